"""Streamed replies: `CallStream`, a call whose tokens are sent as text while they are sampled."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.text_stream import TextStream
from lowmem_grpo.environments.tools.parsers import THINK, THOUGHT, Parser
from lowmem_grpo.server.openai.request_queue import EngineCall
from lowmem_grpo.server.openai.token_texts import TokenTexts
from lowmem_grpo.server.requests import ChatError

T = TypeVar("T")


class CallStream:
    """Passes the tokens of a call from the engine's thread to an event loop, and decodes them there. The engine never
    waits: tokens of a slow reader gather here. If the call's future is cancelled, the engine ends the call."""

    def __init__(self, call: EngineCall, texts: TokenTexts, parser: Any = None) -> None:
        """`parser` is that of the tool calls, if the reply may have any: text is sent up to the first mark of a call,
        and the rest at the end. What another format's parser takes for text is known only at the end."""
        self.call, self.texts = call, texts
        marked = isinstance(parser, Parser) and bool(parser.form.open)
        self.text = until_calls(parser, texts, call.params) if marked else TextStream(texts.tokenizer, call.params)
        self.text.waits = self.text.waits or (parser is not None and not marked)
        self.ids, self.logprobs = list[int](), list[float]()
        self.told = self.letters = 0  # tokens, and their characters, that `new_logprobs` has returned
        self.lock, self.changed = threading.Lock(), running()
        call.on_tokens = self.add
        call.future.add_done_callback(lambda _: self.wake())

    def add(self, ids: list[int], logprobs: list[float]) -> bool:
        """Receive tokens in the engine's thread. Return False if nobody waits for the call any more."""
        with self.lock:
            self.ids += ids
            self.logprobs += logprobs
        self.wake()
        return not self.call.future.cancelled()

    def wake(self) -> None:
        with self.lock:
            if not self.changed.done():
                self.changed.set_result(None)

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the text, which may be empty, each time that tokens came, until the call is done."""
        read = 0
        while True:
            await asyncio.wrap_future(self.changed)
            with self.lock:
                self.changed, new = running(), self.ids[read:]
            if self.call.future.done():
                return
            read += len(new)
            yield self.text.add(new)

    def new_logprobs(self) -> tuple[list[dict[str, Any]], int]:
        """Return OpenAI's log-probabilities of the tokens that came since the last call of this method, and the number
        of characters of all tokens before them."""
        with self.lock:
            ids, logprobs = self.ids[self.told:], self.logprobs[self.told:]
        entries: list[dict[str, Any]] = self.texts.logprobs(ids, logprobs)["content"]
        start, self.letters = self.letters, self.letters + sum(len(entry["token"]) for entry in entries)
        self.told += len(ids)
        return entries, start

    def left(self, logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return of a whole completion's `logprobs` those that `new_logprobs` has not returned."""
        return logprobs and {name: value and value[self.told:] for name, value in logprobs.items()}

    def rest(self, text: str) -> str:
        """Return the part of a whole completion's text that was not sent. ChatError if it does not begin as was sent:
        an engine that died samples again, and may round differently."""
        try:
            return self.text.finish(text)
        except RuntimeError as error:
            raise ChatError(500, str(error)) from error


def until_calls(parser: Any, texts: TokenTexts, params: SamplingParams) -> TextStream:
    """Return a stream of text before the first mark of a tool call. Marks of thoughts are text, if text before a mark
    is decoded as in the whole completion, which is so where tokens are bytes."""
    safe = (THINK, THOUGHT) if texts.by_bytes else ()
    marks = [mark for mark in parser.form.marks if mark not in safe]
    unsaid = frozenset(parser.tokens) & {*texts.tokenizer.all_special_ids}  # marks that are left out of text
    return TextStream(texts.tokenizer, replace(params, stop=[*params.stop_strings, *marks]), unsaid, strips=True)


def running() -> "Future[None]":
    """Return a future that nobody can cancel."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


async def merged(sources: Sequence[AsyncIterator[T]]) -> AsyncGenerator[T, None]:
    """Yield the items of all sources as they come, and raise the first error of a source. A source is at most two items
    ahead of the reader."""
    queue: asyncio.Queue[tuple[bool, Any]] = asyncio.Queue(1)

    async def read(source: AsyncIterator[T]) -> None:
        end: Exception | None = None
        try:
            async for item in source:
                await queue.put((True, item))
        except Exception as error:  # noqa: BLE001, the reader raises it
            end = error
        await queue.put((False, end))

    tasks, left = [asyncio.ensure_future(read(source)) for source in sources], len(sources)
    try:
        while left:
            is_item, item = await queue.get()
            if is_item:
                yield item
            elif item is not None:
                raise item
            else:
                left -= 1
    finally:
        for task in tasks:
            task.cancel()
