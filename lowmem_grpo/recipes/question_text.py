"""One question from several columns of a row: an instruction and its input, or a question and its choices."""

from itertools import chain, repeat
from typing import Any

from lowmem_grpo.data.files import cell_text


def question_text(*parts: Any, marks: str = "") -> str:
    """Join the parts as paragraphs, without empty parts. A part may be a list of choices, or {"text": list, "label":
    list}. Each choice gets its own line: `A. Paris` with its label or with marks="ABCD", otherwise `- Paris`."""
    return "\n\n".join(text for part in parts if (text := choices_text(part, marks)))


def choices_text(part: Any, marks: str) -> str:
    """Return a list or dict of choices as lines, and anything else as text."""
    labels: Any = marks
    if isinstance(part, dict) and isinstance(part.get("text"), list):
        part, labels = part["text"], part.get("label") or marks
    if isinstance(part, dict) and all(isinstance(choice, str | None) for choice in part.values()):
        labels, part = zip(*((label, choice) for label, choice in part.items() if choice is not None), strict=True)
    if not isinstance(part, list | tuple):
        return cell_text(part) or ""
    starts = chain((f"{label}." for label in labels), repeat("-"))
    return "\n".join(f"{start} {cell_text(choice) or ''}" for start, choice in zip(starts, part, strict=False))
