"""The text of completions, which are strings or chats."""

from typing import Any


def completion_texts(completions: list[Any]) -> list[str]:
    """The text of each completion. Raises TypeError for one that is neither a string nor chat messages."""
    return [completion_text(completion) for completion in completions]


def completion_text(completion: Any) -> str:
    """A string as it is; of chat messages the content of the last one, which may be empty."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        content = completion[-1].get("content") or ""
        if isinstance(content, str):
            return content
    raise TypeError(f"a completion is a string or a list of chat messages with text content, not {completion!r:.100}")
