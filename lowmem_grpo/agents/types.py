"""ART's type names for the parts of a trajectory."""

from typing import Any

from openai.types.chat.chat_completion import Choice

Message = dict[str, Any]
MessageOrChoice = Message | Choice
Messages = list[Message]
MessagesAndChoices = list[MessageOrChoice]
Tools = list[dict[str, Any]]


def format_message(message: Message) -> str:
    """Return a message as readable text: its role, its content and its tool calls."""
    said = [str(message.get("content") or message.get("refusal") or "")]
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        said.append(f"{function.get('name')}({function.get('arguments')})")
    return f"{str(message.get('role', '')).capitalize()}:\n" + "\n".join(filter(None, said))
