"""Completions in OpenAI's shape: those that one request asks for, and the reply that they make up."""

import asyncio
import json
import random
import re
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.prompt_inputs import text_ids
from lowmem_grpo.engines.request_output import Logprob
from lowmem_grpo.server.errors import ChatError
from lowmem_grpo.server.openai.engine_worker import EngineWorker
from lowmem_grpo.server.openai.request import CompletionRequest
from lowmem_grpo.server.openai.request_queue import Call, WorkerClosedError
from lowmem_grpo.types import Turn

BYTES = {letter: number for number, letter in bytes_to_unicode().items()}  # as byte-level vocabularies write them
ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
DONE = b"data: [DONE]\n\n"  # how a stream ends
Choice = dict[str, Any]
Record = Callable[[list[Choice]], Awaitable[None]]


class TokenTexts:
    """Tokens as texts and as bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.by_bytes = "ByteLevel" in str(getattr(backend, "decoder", ""))
        self.added = set(tokenizer.added_tokens_decoder)
        self.lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        with self.lock:
            return text_ids(self.tokenizer, text)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token, which may be a part of a letter."""
        piece = str(self.tokenizer.convert_ids_to_tokens(token) or "")  # what pads a vocabulary has none
        if self.by_bytes and token not in self.added and all(letter in BYTES for letter in piece):
            return bytes(BYTES[letter] for letter in piece)
        match = ONE_BYTE.fullmatch(piece)
        return bytes([int(match[1], 16)]) if match else str(self.tokenizer.decode([token])).encode()

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.bytes_of(token)
        return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": max(logprob, -9999.0)}

    def logprobs(self, turn: Turn, likeliest: list[dict[int, Logprob]] | None, count: int) -> dict[str, Any]:
        """Those of a turn as they were drawn, and at each place the `count` likeliest tokens of the model itself."""
        content = []
        for place, (token, logprob) in enumerate(zip(turn.completion_ids, turn.logprobs, strict=True)):
            others = [] if likeliest is None else [
                self.entry(other, likely.logprob) for other, likely in likeliest[place].items() if likely.rank <= count]
            content.append(self.entry(token, logprob) | {
                "top_logprobs": sorted(others, key=lambda entry: -entry["logprob"])[:count]})
        return {"content": content, "refusal": None}


class PendingCompletions:
    """The completions of one request: they wait at the worker, or are drawn."""

    prefix, whole, piece = "", "", ""  # what the reply's id begins with; the types of a reply and of a chunk

    def __init__(
        self, worker: EngineWorker, texts: TokenTexts, asked: CompletionRequest, prompts: list[list[int]],
        adapter: Path | str | None, most: int | None, key: Callable[[int], int | None] = lambda place: None,
    ) -> None:
        """`most` bounds every completion; `key` returns that of a conversation. ChatError without room to answer."""
        step = asked.model.rpartition("@")[2]  # the version of the policy, as in RUN@12
        version = int(step) if step.isdecimal() else None
        self.worker, self.texts, self.asked, self.turns = worker, texts, asked, list[Turn]()
        self.calls = [Call(ids, params_of(asked, len(ids), place, worker.context, most), adapter, key(place), version)
                      for ids in prompts for place in range(asked.n)]
        self.futures: list[Future[Turn]] = [worker.submit(call) for call in self.calls]
        self.head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": asked.model}

    async def drawn(self, place: int) -> tuple[Turn, list[dict[int, Logprob]] | None]:
        """Return a call's turn, once it is drawn, and the likeliest tokens, if asked for. ChatError says why not."""
        call, count = self.calls[place], self.asked.likeliest
        try:
            turn = await asyncio.wrap_future(self.futures[place])
            likeliest = None
            if count:
                likeliest = await asyncio.wrap_future(self.worker.likeliest(call, turn, count))
        except WorkerClosedError as error:
            raise ChatError(503, str(error)) from error
        except ValueError as error:  # such as a temperature that vLLM would change
            raise ChatError(400, str(error)) from error
        except Exception as error:
            if isinstance(call.adapter, Path) and not call.adapter.exists():
                raise ChatError(404, "the weights of this model were deleted before it could answer", "model",
                                "model_not_found") from error
            raise ChatError(500, f"the engine could not answer ({type(error).__name__}: {error})") from error
        self.turns.append(turn)
        return turn, likeliest

    def logprobs(self, turn: Turn, likeliest: list[dict[int, Logprob]] | None) -> dict[str, Any] | None:
        """Return those of a turn as they were drawn, where they are asked for."""
        count = self.asked.likeliest
        return None if count is None else self.texts.logprobs(turn, likeliest, count)

    async def answer(self, place: int) -> tuple[Turn, Choice]:
        """Return a choice, as soon as its turn is drawn."""
        raise NotImplementedError

    def keep(self, turn: Turn, choice: Choice) -> Choice:
        return choice

    def pieces(self, choice: Choice) -> Iterator[Choice]:
        """Return a choice as the choices of a stream's chunks."""
        yield choice

    def usage(self) -> dict[str, Any]:
        """Count the tokens of each prompt, once, and of the completions."""
        prompt = sum(len(call.ids) for call in self.calls) // self.asked.n
        drawn = sum(len(turn.completion_ids) for turn in self.turns)
        return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}

    def reply(self, choices: list[Choice]) -> dict[str, Any]:
        return self.head | {"object": self.whole, "choices": choices, "usage": self.usage()}

    def chunk(self, choices: list[Choice], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        return self.head | {"object": self.piece, "choices": choices, "usage": usage}

    def finish_request(self) -> None:
        """The request is answered, or nobody waits for the answer any more."""
        for future in self.futures:
            future.cancel()


async def unrecorded(choices: list[Choice]) -> None:
    """Nobody records these choices."""


class Completer:
    """Answers requests, from any thread and event loop. `record` is called with the choices that are about to be told.

    Where the caller goes away (the coroutine is cancelled), nothing is kept."""

    def start_request(self, body: Mapping[str, Any], session: str) -> PendingCompletions:
        """Read a request, and let its calls wait at the worker. ChatError in OpenAI's form."""
        raise NotImplementedError

    async def create(self, body: Mapping[str, Any], session: str = "", record: Record = unrecorded) -> dict[str, Any]:
        """Return the JSON of a reply. Turns of one `session` belong together. ChatError in OpenAI's form."""
        if body.get("stream") is True:
            raise ChatError(400, "stream is true; a stream comes from stream(), a whole reply from create()", "stream")
        pending = self.start_request(body, session)
        try:
            answers = await asyncio.gather(*map(pending.answer, range(len(pending.calls))))
            choices = [pending.keep(*answer) for answer in answers]
            await record(choices)
            return pending.reply(choices)
        finally:
            pending.finish_request()

    async def stream(
        self, body: Mapping[str, Any], session: str = "", record: Record = unrecorded,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a reply. The text of a choice comes in one, as soon as its turn is drawn. A request that
        is refused raises ChatError before the first chunk."""
        pending = self.start_request({**body, "stream": True}, session)
        try:
            for answer in asyncio.as_completed(map(pending.answer, range(len(pending.calls)))):
                choice = pending.keep(*await answer)
                for piece in pending.pieces(choice):
                    if piece["finish_reason"] is not None:
                        await record([choice])
                    yield pending.chunk([piece])
            if pending.asked.stream_options.get("include_usage"):
                yield pending.chunk([], pending.usage())
        finally:
            pending.finish_request()


def params_of(asked: CompletionRequest, prompt: int, place: int, context: int, most: int | None) -> SamplingParams:
    """Return the sampling of completion number `place` behind a prompt of so many tokens; ChatError without room."""
    room, field = context - prompt, asked.field
    if room < 1:
        raise ChatError(
            400, f"This model's maximum context length is {context} tokens. However, your {field} resulted in {prompt} "
            f"tokens. Please reduce the length of the {field}, or load the model with a larger max_seq_length", field,
            "context_length_exceeded")
    bounds = (room, asked.bound, most)
    seed = None if asked.seed is None else random.Random(f"{asked.seed}-{place}").getrandbits(62)
    return SamplingParams(max_tokens=min(bound for bound in bounds if bound is not None), seed=seed, **asked.sampling)


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
