"""The text of completions, which are strings or chats."""

from typing import Any


def completion_texts(completions: list[Any]) -> list[str]:
    """Return the text of each completion. TypeError for a completion that is neither a string nor chat messages."""
    return [completion_text(completion) for completion in completions]


def completion_text(completion: Any) -> str:
    """Return a completion's text: the string itself, or the content (possibly empty) of the last assistant message of a
    chat; without an assistant message, that of its last message. TypeError for anything else."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list) and completion and all(isinstance(message, dict) for message in completion):
        said = [message for message in completion if message.get("role") == "assistant"] or list(completion)
        content = said[-1].get("content") or ""
        if isinstance(content, str):
            return content
    raise TypeError(f"a completion is a string or a list of chat messages with text content, not {completion!r:.100}")
