"""Turns in the form of OpenAI's replies: whole ones, and the chunks of a stream."""

import json
import re
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lowmem_grpo.engines.prompt_inputs import text_ids
from lowmem_grpo.engines.request_output import Logprob
from lowmem_grpo.environments.tools.parsers import Reading
from lowmem_grpo.service.messages import message_of
from lowmem_grpo.types import Message, Turn

BYTES = {letter: number for number, letter in bytes_to_unicode().items()}  # of byte-level vocabularies
ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
DONE = b"data: [DONE]\n\n"  # how a stream ends


class TokenTexts:
    """Tokens as texts and as bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.by_bytes = "ByteLevel" in str(getattr(backend, "decoder", ""))
        self.added = set(tokenizer.added_tokens_decoder)
        self.lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that is to be continued."""
        with self.lock:
            return text_ids(self.tokenizer, text)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token, which may be a part of a letter."""
        piece = str(self.tokenizer.convert_ids_to_tokens(token) or "")  # what pads a vocabulary has none
        if self.by_bytes and token not in self.added and all(letter in BYTES for letter in piece):
            return bytes(BYTES[letter] for letter in piece)
        found = ONE_BYTE.fullmatch(piece)
        return bytes([int(found[1], 16)]) if found else str(self.tokenizer.decode([token])).encode()

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        """A token and its log-probability."""
        raw = self.bytes_of(token)
        return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": max(logprob, -9999.0)}

    def logprobs(self, turn: Turn, likeliest: list[dict[int, Logprob]] | None, count: int) -> dict[str, Any]:
        """Those of a turn as they were drawn, and at each place the `count` likeliest tokens of the model itself."""
        content = []
        for place, (token, logprob) in enumerate(zip(turn.completion_ids, turn.logprobs, strict=True)):
            others = [] if likeliest is None else [
                self.entry(other, one.logprob) for other, one in likeliest[place].items() if one.rank <= count]
            content.append(self.entry(token, logprob) | {
                "top_logprobs": sorted(others, key=lambda one: -one["logprob"])[:count]})
        return {"content": content, "refusal": None}


@dataclass
class Answer:
    """One choice of a reply."""

    index: int
    turn: Turn
    reading: Reading
    logprobs: dict[str, Any] | None = None
    token_ids: bool = False
    name: str = ""  # of the turn

    @cached_property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls, each with an id."""
        return [{"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {
            "name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}}
            for call in self.reading.calls]

    @property
    def content(self) -> str | None:
        return self.reading.content if self.reading.content or not self.calls else None

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.calls else self.turn.finish_reason

    @property
    def message(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        called = {"tool_calls": self.calls} if self.calls else {}
        return {"role": "assistant", "content": self.content, "refusal": None, **called}

    @property
    def said(self) -> Message:
        """As it will be read when the client sends it back."""
        return message_of(self.message, "message")

    @property
    def extras(self) -> dict[str, Any]:
        """What OpenAI's choices do not have."""
        return {"turn": self.name} | ({"token_ids": self.turn.completion_ids} if self.token_ids else {})

    @property
    def choice(self) -> dict[str, Any]:
        """The choice of a whole reply."""
        return {"index": self.index, "message": self.message, "finish_reason": self.finish_reason,
                "logprobs": self.logprobs, **self.extras}

    def deltas(self) -> Iterator[dict[str, Any]]:
        """The same as choices of chunks."""
        def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
            return {"index": self.index, "delta": delta, "finish_reason": reason, "logprobs": None, "turn": self.name,
                    **more}

        yield chunk({"role": "assistant", "content": ""})
        if self.content:
            yield chunk({"content": self.content}, logprobs=self.logprobs)
        for place, call in enumerate(self.calls):
            yield chunk({"tool_calls": [{"index": place, **call}]})
        unsaid = {} if self.content else {"logprobs": self.logprobs}
        yield chunk({}, self.finish_reason, **self.extras, **unsaid)


@dataclass
class Reply:
    """The reply to one request."""

    model: str
    prompt_ids: list[int]
    token_ids: bool
    answers: list[Answer] = field(default_factory=list)
    name: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self) -> dict[str, Any]:
        """All choices at once."""
        choices = [answer.choice for answer in sorted(self.answers, key=lambda one: one.index)]
        ids = {"prompt_token_ids": self.prompt_ids} if self.token_ids else {}
        return self.head("chat.completion") | {"choices": choices, "usage": self.usage(), **ids}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """One piece of a stream."""
        return self.head("chat.completion.chunk") | {"choices": choices, "usage": usage}

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompt, once, and of all completions."""
        drawn = sum(len(answer.turn.completion_ids) for answer in self.answers)
        cached = max((answer.turn.cached_tokens for answer in self.answers), default=0)
        return {"prompt_tokens": len(self.prompt_ids), "completion_tokens": drawn,
                "total_tokens": len(self.prompt_ids) + drawn, "prompt_tokens_details": {"cached_tokens": cached}}


class Gathered:
    """The choices that the chunks of a stream make up."""

    def __init__(self) -> None:
        self.choices: dict[int, dict[str, Any]] = {}

    def finished_by(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the choices that end with this chunk."""
        return [choice for part in chunk["choices"] if (choice := self.add(part))["finish_reason"] is not None]

    def add(self, part: dict[str, Any]) -> dict[str, Any]:
        """Return the choice that a further part belongs to."""
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
    """Return a server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
