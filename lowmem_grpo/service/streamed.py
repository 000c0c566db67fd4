"""The events of a streamed reply, and the choices that its chunks make up."""

import json
from typing import Any

DONE = b"data: [DONE]\n\n"


class Gathered:
    """Chunks put together."""

    def __init__(self) -> None:
        self.choices: dict[int, dict[str, Any]] = {}

    def finished_by(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices that end with this chunk."""
        return [choice for part in chunk["choices"] if (choice := self.add(part))["finish_reason"] is not None]

    def add(self, part: dict[str, Any]) -> dict[str, Any]:
        """The choice that one more part belongs to."""
        empty = {"finish_reason": None, "logprobs": None, "message": {"role": "assistant", "content": None}}
        choice = self.choices.setdefault(part["index"], empty)
        add_delta(choice["message"], part["delta"])
        choice |= {name: value for name, value in part.items() if name != "delta" and value is not None}
        return choice

def add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add what a chunk brings to a message."""
    if delta.get("content"):
        message["content"] = (message["content"] or "") + delta["content"]
    for part in delta.get("tool_calls") or []:
        calls = message.setdefault("tool_calls", [])
        if part["index"] == len(calls):
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[part["index"]]
        call["id"] += part.get("id") or ""
        for name, text in (part.get("function") or {}).items():
            call["function"][name] += text or ""

def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
