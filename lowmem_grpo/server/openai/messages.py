"""The messages of a chat request: their checks, a normalized plain form, and digests that look up cached turns."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lowmem_grpo.engines.prompt_inputs import plain_message
from lowmem_grpo.server.requests import ChatError, shown
from lowmem_grpo.types import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
KEPT = ("name", "reasoning_content", "thinking")  # text fields that a chat template may read
OWN = ("role", "content", "tool_calls", "tool_call_id", "turn")
EMPTY: tuple[Any, ...] = (None, [], {}, "")  # values of fields that are unset, as in replies


def plain(messages: Any) -> list[Message]:
    """Return a request's messages in the plain form for chat templates: content as text, arguments as objects, tool
    results in the order of the calls and with their tools' names. ChatError for invalid messages."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ChatError(400, f"messages is {shown(messages)}; it must be a list of at least one message such as "
                        "{'role': 'user', 'content': 'Hello'}", "messages")
    checked = [message_of(plain_message(message), f"messages[{at}]") for at, message in enumerate(messages)]
    return list(in_order(checked))


def turn_named(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the turn name in the key `turn` of the last assistant message; empty if it has none."""
    last: Mapping[str, Any] = next((message for message in reversed(messages) if message["role"] == "assistant"), {})
    return str(last.get("turn") or "")


def message_of(message: Any, place: str) -> Message:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, Mapping) else message
        raise ChatError(400, f"{place}.role is {shown(role)}; allowed are {', '.join(ROLES)}", f"{place}.role")
    role = ROLES[message["role"]]
    calls = calls_of(message.get("tool_calls") or [], f"{place}.tool_calls")
    if calls and role != "assistant":
        raise ChatError(400, f"{place} is of the role {role} and has tool_calls; only the assistant calls tools",
                        f"{place}.tool_calls")
    if other := [key for key, value in message.items() if key not in (*OWN, *KEPT) and value not in EMPTY]:
        raise ChatError(400, f"{place} has {other[0]}, which is not supported; leave it out. A message has role, "
                        "content, tool_calls, tool_call_id and name", f"{place}.{other[0]}")
    content = text_of(message.get("content"), f"{place}.content", needed=role != "assistant")
    kept = {key: str(message[key]) for key in KEPT if message.get(key)}
    called = {"tool_calls": calls} if calls else {}
    answers = {"tool_call_id": str(message["tool_call_id"])} if role == "tool" and message.get("tool_call_id") else {}
    return {"role": role, **kept, "content": content, **called, **answers}


def text_of(content: Any, place: str, needed: bool) -> str:
    """Return the text of a message's content: a string, or a list of text parts to join."""
    if content is None and not needed:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ChatError(400, f"{place} is {shown(content)}; it must be a text or a list of parts of the type text",
                        place)
    for at, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ChatError(400, f"{place}[{at}] is a part of the type {shown(kind)}; only text is supported, as in "
                            "{'type': 'text', 'text': 'Hello'}", f"{place}[{at}].type")
    return "".join(part["text"] for part in content)


def calls_of(tool_calls: Any, place: str) -> list[dict[str, Any]]:
    """Return the tool calls of an assistant message, with arguments parsed to objects if they are valid JSON."""
    calls = []
    for at, call in enumerate(tool_calls if isinstance(tool_calls, Sequence) else [tool_calls]):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ChatError(400, f"{place}[{at}] is {shown(call)}; it must be {{'id': ..., 'type': 'function', "
                            "'function': {'name': ..., 'arguments': '{...}'}}", f"{place}[{at}]")
        calls.append({"id": str(call.get("id") or ""), "type": "function", "function": {
            "name": function["name"], "arguments": read_arguments(function.get("arguments"))}})
    return calls


def read_arguments(arguments: Any) -> Any:
    """Parse arguments to an object; a string that is not a JSON object stays as it is."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def in_order(messages: list[Message]) -> Iterator[Message]:
    """Yield messages without call ids: tool results are ordered as the calls before them, and named by their tool."""
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or []
        if calls:
            message = message | {"tool_calls": [{key: call[key] for key in ("type", "function")} for call in calls]}
        yield message
        names = {call["id"]: (place, call["function"]["name"]) for place, call in enumerate(calls)}
        end = next((n for n in range(at, len(messages)) if messages[n]["role"] != "tool"), len(messages))
        results = sorted(messages[at:end],
                         key=lambda result: names.get(result.get("tool_call_id", ""), (len(names), ""))[0])
        for result in results:
            name = names.get(result.get("tool_call_id", ""), (0, result.get("name")))[1]
            rest = {key: value for key, value in result.items() if key not in ("tool_call_id", "name")}
            yield {"role": rest.pop("role"), **({"name": name} if name else {}), **rest}
        at = end


def digests(root: Any, messages: Sequence[Message]) -> list[bytes]:
    """Return the digests of all prefixes of a conversation, from the empty one to all N messages: N + 1 digests."""
    chain = [hashlib.blake2b(canonical(root), digest_size=16).digest()]
    for message in messages:
        chain.append(longer(chain[-1], message))
    return chain


def longer(before: bytes, message: Message) -> bytes:
    """Return the digest of a conversation plus one message, from the message's role, text, and tool calls."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or []]
    name = message.get("name") if message["role"] == "tool" else None
    said = canonical([message["role"], name, message["content"], calls])
    return hashlib.blake2b(said, key=before, digest_size=16).digest()


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()
