"""A ChatHandler without a model, whose replies a script writes; and an endpoint that serves it."""

import asyncio
import functools
import itertools
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import openai
from programs import until as until  # for those who import it from here

from lowmem_grpo.server.openai.chat_handler import Record, unrecorded
from lowmem_grpo.server.openai.request_queue import LIVE
from lowmem_grpo.server.requests import ChatError

Says = Callable[[list[dict[str, Any]]], Awaitable[str]]


async def echo(messages: list[dict[str, Any]]) -> str:
    """Says the last message again."""
    return f"heard: {messages[-1]['content']}"


async def nothing() -> None:
    """Done between two chunks of a stream."""


class ScriptedChat:
    """Answers as a ChatHandler does. A message that is sent to it may be continued by the text that it became."""

    def __init__(self, says: Says = echo, between: Callable[[], Awaitable[None]] = nothing) -> None:
        self.says, self.between, self.numbers, self.cancelled = says, between, itertools.count(), 0
        self.said: dict[str, str] = {}  # of a conversation so far, the turn that ended it
        self.before: dict[str, str | None] = {}
        self.busy = self.most = 0

    def names(self) -> Mapping[str, str | None]:
        return {"agent": LIVE, "base/model": None}

    def parent(self, turn: str) -> str | None:
        return self.before[turn]

    async def create(
        self, body: Mapping[str, Any], session: str = "", record: Record = unrecorded, texts: bool = False,
    ) -> dict[str, Any]:
        if body.get("model") not in self.names():
            raise ChatError(404, f"no model {body.get('model')!r}", "model", "model_not_found")
        choices = [await self.choice(body, session, index) for index in range(body.get("n") or 1)]
        await record(choices)
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"],
                "choices": choices, "usage": usage}

    async def choice(self, body: Mapping[str, Any], session: str, index: int) -> dict[str, Any]:
        self.busy += 1
        self.most = max(self.most, self.busy)
        try:
            text = await self.says(body["messages"])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.busy -= 1
        turn = f"turn-{next(self.numbers)}"
        so_far = [(one["role"], one["content"]) for one in body["messages"]]
        self.before[turn] = self.said.get(f"{session}{so_far[:-1]}")
        self.said[f"{session}{[*so_far, ('assistant', text)]}"] = turn
        return {"index": index, "finish_reason": "stop", "turn": turn, "logprobs": None,
                "message": {"role": "assistant", "content": text}}

    async def stream(
        self, body: Mapping[str, Any], session: str = "", record: Record = unrecorded, texts: bool = False,
    ) -> AsyncIterator[dict[str, Any]]:
        reply = await self.create(body, session)
        about = {"id": reply["id"], "object": "chat.completion.chunk", "created": 1, "model": reply["model"]}
        for choice in reply["choices"]:
            name = {"index": choice["index"], "turn": choice["turn"]}
            for letter in choice["message"]["content"]:
                yield about | {"choices": [name | {"delta": {"content": letter}, "finish_reason": None}]}
                await self.between()
            await record([choice])
            yield about | {"choices": [name | {"delta": {}, "finish_reason": "stop"}]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield about | {"choices": [], "usage": reply["usage"]}


class Gated:
    """Lets no reply out until it is opened, and tells when one has come so far."""

    def __init__(self) -> None:
        self.arrived, self.opened = threading.Semaphore(0), threading.Event()

    async def __call__(self, messages: list[dict[str, Any]]) -> str:
        self.arrived.release()
        while not self.opened.is_set():
            await asyncio.sleep(0.005)
        return await echo(messages)

    def wait_for(self, number: int) -> None:
        """Until so many more have come."""
        for _ in range(number):
            assert self.arrived.acquire(timeout=60)


def client_of(served: Any, **options: Any) -> openai.OpenAI:
    """OpenAI's own client, for an endpoint or a session. All share their connections: to make these takes long."""
    given: dict[str, Any] = {"base_url": served.base_url, "api_key": served.api_key, "max_retries": 0}
    return plain_client().with_options(**given | options)


@functools.cache
def plain_client() -> openai.OpenAI:
    """A client for no address."""
    return openai.OpenAI(base_url="http://127.0.0.1:1", api_key="none")


def begun(base_url: str, api_key: str, **body: Any) -> HTTPConnection:
    """A request for a chat whose reply nobody reads: its client leaves when this is closed."""
    address = urlsplit(base_url)
    connection = HTTPConnection(address.netloc, timeout=60)
    connection.request("POST", f"{address.path}/chat/completions", json.dumps(body),
                       {"Authorization": f"Bearer {api_key}"})
    return connection
