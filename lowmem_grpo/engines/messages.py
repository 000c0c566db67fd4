"""Chat messages as people's rows hold them, in the form that chat templates are written for.

Arrow (datasets, parquet) gives all dicts of a column the same keys, and None to those that a dict did not have, which
templates write or refuse. So these keys are left out, at any depth, as `remove_none_values` of TRL does.
"""

from collections.abc import Mapping
from typing import Any


def without_none(value: Any) -> Any:
    """Return a value without the keys, at any depth, whose value is None."""
    if isinstance(value, Mapping):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list) else value


def is_message(value: Any) -> bool:
    """Return whether it is a chat message: a role, with a content or with tool calls."""
    return isinstance(value, Mapping) and "role" in value and ("content" in value or "tool_calls" in value)


def plain_message(message: Any) -> Any:
    """Return a chat message without keys that say nothing; beside tool calls, a content that is missing is None."""
    if not is_message(message):
        return message
    content = without_none(message.get("content"))
    kept = {key: without_none(value) if key == "tool_calls" else value for key, value in message.items()
            if value is not None and (key, value) != ("tool_calls", [])}
    return kept | {"content": content} if "content" in message or "tool_calls" in kept else kept


def joined_text(message: Any) -> Any:
    """Return a chat message whose content is one text, where it is a list of parts that are all text."""
    parts = message.get("content") if is_message(message) else None
    if not isinstance(parts, list) or not parts:
        return message
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
             for part in parts]
    return {**message, "content": "".join(texts)} if all(isinstance(text, str) for text in texts) else message
