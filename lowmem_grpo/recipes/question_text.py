"""One question out of several columns of a row: an instruction and its input, a question with its choices."""

from itertools import chain, repeat
from typing import Any

from lowmem_grpo.data.files import cell_text


def question_text(*parts: Any, marks: str = "") -> str:
    """The parts as paragraphs, without empty ones. Of choices, each has a line: `A. Paris` with marks="ABCD", `- Paris`
    without; choices are a list, or {"text": list, "label": list}, whose labels are its own marks."""
    return "\n\n".join(text for part in parts if (text := choices_text(part, marks)))


def choices_text(part: Any, marks: str) -> str:
    """A list as lines; anything else as it is, as text."""
    labels: Any = marks
    if isinstance(part, dict) and isinstance(part.get("text"), list):
        part, labels = part["text"], part.get("label") or marks
    if not isinstance(part, list):
        return cell_text(part) or ""
    starts = chain((f"{label}." for label in labels), repeat("-"))
    return "\n".join(f"{start} {cell_text(choice) or ''}" for start, choice in zip(starts, part, strict=False))
