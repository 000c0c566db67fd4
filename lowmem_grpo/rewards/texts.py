"""The text of completions, which are strings or chats, and the labels in a dataset's cells."""

from typing import Any


def completion_texts(completions: list[Any]) -> list[str]:
    """Return the text of each completion. TypeError for a completion that is neither a string nor chat messages."""
    return [completion_text(completion) for completion in completions]


def completion_text(completion: Any) -> str:
    """Return a completion's text: the string itself, or the content of a chat's last assistant message, else of its
    last message. TypeError for anything else."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list) and completion and all(isinstance(message, dict) for message in completion):
        said = [message for message in completion if message.get("role") == "assistant"] or list(completion)
        content = said[-1].get("content") or ""
        if isinstance(content, str):
            return content
    raise TypeError(f"a completion is a string or a list of chat messages with text content, not {completion!r:.100}")


def values_of(cell: Any) -> list[Any]:
    """Return the values in a dataset cell (a row's value in one column): the items of a list, set or array, else the
    value itself. None and pandas' NaN are left out."""
    cell = cell.numpy() if hasattr(cell, "numpy") else cell  # a tensor
    many = isinstance(cell, (list, tuple, set, frozenset)) or getattr(cell, "ndim", 0) > 0
    return [value for value in (cell if many else [cell])
            if isinstance(value, str) or str(value) not in ("None", "nan", "NaT", "<NA>")]


def labels_of(cell: Any) -> list[Any]:
    """Return the labels in a dataset cell (a row's value in one column). A float such as 18.0, which pandas makes of 18
    if other cells are empty, also gives the label 18."""
    labels = values_of(cell)
    return [*labels, *(int(label) for label in labels if hasattr(label, "is_integer") and label.is_integer())]


def label_text(label: Any) -> str:
    """Return a label as text; empty for bytes, dicts, lists and arrays, which no answer's text can equal."""
    many = isinstance(label, (bytes, bytearray, dict, list, tuple, set)) or getattr(label, "ndim", 0) > 0
    return "" if many else str(label)
