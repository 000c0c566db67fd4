"""The completions of one request while they are sampled, and the OpenAI-format reply made from them."""

import asyncio
import json
import random
import re
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompt_inputs import text_ids
from lowmem_grpo.engines.request_output import Logprob
from lowmem_grpo.environments.tools.parsers import Reading
from lowmem_grpo.server.openai.conversation_cache import ConversationCache, PromptState
from lowmem_grpo.server.openai.engine_worker import EngineWorker
from lowmem_grpo.server.openai.request import ChatRequest, CompletionRequest, message_of
from lowmem_grpo.server.openai.request_queue import Call, WorkerClosedError
from lowmem_grpo.server.requests import ChatError
from lowmem_grpo.types import Turn

BYTES = {letter: number for number, letter in bytes_to_unicode().items()}  # bytes by letter in byte-level vocabularies
ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
DONE = b"data: [DONE]\n\n"  # the last event of a stream
Choice = dict[str, Any]
Record = Callable[[list[Choice]], Awaitable[None]]


class TokenTexts:
    """The text, bytes and OpenAI logprob entries of tokens."""

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
        """Return the bytes of a token, which may be part of a UTF-8 character."""
        piece = str(self.tokenizer.convert_ids_to_tokens(token) or "")  # padding entries of the vocabulary have none
        if self.by_bytes and token not in self.added and all(letter in BYTES for letter in piece):
            return bytes(BYTES[letter] for letter in piece)
        match = ONE_BYTE.fullmatch(piece)
        return bytes([int(match[1], 16)]) if match else str(self.tokenizer.decode([token])).encode()

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.bytes_of(token)
        return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": max(logprob, -9999.0)}

    def logprobs(self, turn: Turn, likeliest: list[dict[int, Logprob]] | None, count: int) -> dict[str, Any]:
        """Return OpenAI's logprobs: those of the sampled tokens, and the `count` likeliest of the model itself."""
        content = []
        for place, (token, logprob) in enumerate(zip(turn.completion_ids, turn.logprobs, strict=True)):
            others = [] if likeliest is None else [
                self.entry(other, likely.logprob) for other, likely in likeliest[place].items() if likely.rank <= count]
            content.append(self.entry(token, logprob) | {
                "top_logprobs": sorted(others, key=lambda entry: -entry["logprob"])[:count]})
        return {"content": content, "refusal": None}


class PendingCompletions:
    """The completions of one request; the constructor submits them to the worker."""

    prefix, whole, piece = "", "", ""  # the id's prefix; `object` of a reply and of a chunk

    def __init__(
        self, asked: CompletionRequest, prompts: list[list[int]], keys: Sequence[int | None] = (), *,
        worker: EngineWorker, texts: TokenTexts, adapter: Path | str | None,
    ) -> None:
        """`keys` are the conversation keys, one per completion. ChatError if a prompt leaves no room for an answer."""
        step = asked.model.rpartition("@")[2]  # the policy version in a name such as RUN@12
        version = int(step) if step.isdecimal() else None
        self.worker, self.texts, self.asked, self.turns = worker, texts, asked, list[Turn]()
        self.calls = [Call(ids, params_of(asked, len(ids), place, worker.context), adapter, key, version)
                      for ids in prompts for place, key in enumerate(keys or [None] * asked.n)]
        for call in self.calls:
            worker.submit(call)
        self.head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": asked.model}

    async def drawn(self, place: int) -> tuple[Turn, list[dict[int, Logprob]] | None]:
        """Await a call's turn, and the likeliest tokens if the request asks for them. ChatError if the call failed."""
        call, count = self.calls[place], self.asked.likeliest
        try:
            turn = await asyncio.wrap_future(call.future)
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
        """Return the reply's logprobs for a turn; None if the request does not ask for them."""
        count = self.asked.likeliest
        return None if count is None else self.texts.logprobs(turn, likeliest, count)

    async def answer(self, place: int) -> tuple[Turn, Choice]:
        """Await the turn of call number `place`, and return it with its choice."""
        raise NotImplementedError

    def keep(self, turn: Turn, choice: Choice) -> Choice:
        """Cache a turn, where turns are cached, and return its choice as it is sent."""
        return choice

    def pieces(self, choice: Choice) -> Iterator[Choice]:
        """Yield a choice as the choices of a stream's chunks."""
        yield choice

    def usage(self) -> dict[str, Any]:
        """Return the token counts; each prompt counts once, however many completions it has."""
        prompt = sum(len(call.ids) for call in self.calls) // self.asked.n
        drawn = sum(len(turn.completion_ids) for turn in self.turns)
        return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}

    def reply(self, choices: list[Choice]) -> dict[str, Any]:
        """Return the JSON of the whole reply."""
        return self.head | {"object": self.whole, "choices": choices, "usage": self.usage()}

    def chunk(self, choices: list[Choice], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON of one chunk of a streamed reply."""
        return self.head | {"object": self.piece, "choices": choices, "usage": usage}

    def finish_request(self) -> None:
        """Cancel the calls that are not done; called after the reply, or when the client has left."""
        for call in self.calls:
            call.future.cancel()


class PendingChat(PendingCompletions):
    """The answers to one chat request, each a turn of its conversation."""

    prefix, whole, piece = "chatcmpl", "chat.completion", "chat.completion.chunk"
    asked: ChatRequest

    def __init__(self, histories: ConversationCache, opening: PromptState, asked: ChatRequest, **options: Any) -> None:
        """`opening` is the prompt that `histories` opened for `asked`; `options` are those of PendingCompletions."""
        self.histories, self.opening, self.kept = histories, opening, False
        keys = [opening.key, *islice(histories.keys, asked.n - 1)]
        super().__init__(asked, [opening.ids], keys, **options)

    async def answer(self, place: int) -> tuple[Turn, Choice]:
        asked, (turn, likeliest) = self.asked, await self.drawn(place)
        reading = self.histories.read(self.opening, turn) if asked.tool_choice != "none" else Reading(turn.text)
        if not asked.parallel_tool_calls:
            reading.calls = reading.calls[:1]
        turn = replace(turn, calls=len(reading.calls) + len(reading.errors), failures=len(reading.errors))
        message = reply_message(reading)
        turn.message = message_of(message, "message")  # in plain form, as it is read when the client sends it back
        return turn, {
            "index": place, "message": message, "finish_reason": "tool_calls" if reading.calls else turn.finish_reason,
            "logprobs": self.logprobs(turn, likeliest)}

    def keep(self, turn: Turn, choice: Choice) -> Choice:
        """Cache the turn, and put its name into the choice."""
        self.kept = True
        choice["turn"] = self.histories.keep(self.opening, turn, turn.message, self.calls[choice["index"]].key)
        choice["completion_tokens"] = len(turn.completion_ids)
        return choice | ({"token_ids": turn.completion_ids} if self.asked.return_token_ids else {})

    def pieces(self, choice: Choice) -> Iterator[Choice]:
        message, rest = choice["message"], {name: value for name, value in choice.items() if name != "message"}

        def piece(delta: dict[str, Any], **more: Any) -> Choice:
            return {"index": rest["index"], "delta": delta, "finish_reason": None, "logprobs": None,
                    "turn": rest["turn"], **more}

        yield piece({"role": "assistant", "content": ""})
        if message["content"]:
            yield piece({"content": message["content"]}, logprobs=rest.pop("logprobs"))
        for place, call in enumerate(message.get("tool_calls", ())):
            yield piece({"tool_calls": [{"index": place, **call}]})
        yield piece({}) | rest

    def usage(self) -> dict[str, Any]:
        cached = max((turn.cached_tokens for turn in self.turns), default=0)
        return super().usage() | {"prompt_tokens_details": {"cached_tokens": cached}}

    def reply(self, choices: list[Choice]) -> dict[str, Any]:
        return super().reply(choices) | ({"prompt_token_ids": self.opening.ids} if self.asked.return_token_ids else {})

    def finish_request(self) -> None:
        super().finish_request()
        self.histories.close_prompt(self.opening, self.kept)


class PendingTexts(PendingCompletions):
    """The completions of one request of plain prompts."""

    prefix, whole, piece = "cmpl", "text_completion", "text_completion"

    async def answer(self, place: int) -> tuple[Turn, Choice]:
        turn, likeliest = await self.drawn(place)
        choice = {"index": place, "text": turn.text, "finish_reason": turn.finish_reason,
                  "logprobs": self.logprobs(turn, likeliest)}
        if self.asked.return_token_ids:
            choice |= {"prompt_token_ids": turn.prompt_ids, "token_ids": turn.completion_ids}
        return turn, choice

    def logprobs(self, turn: Turn, likeliest: list[dict[int, Logprob]] | None) -> dict[str, Any] | None:
        told = super().logprobs(turn, likeliest)
        if told is None:
            return None
        places = told["content"]
        tokens = [place["token"] for place in places]
        others = [{other["token"]: other["logprob"] for other in place["top_logprobs"]} for place in places]
        return {"tokens": tokens, "token_logprobs": [place["logprob"] for place in places],
                "top_logprobs": others if self.asked.likeliest else None,
                "text_offset": [sum(map(len, tokens[:place])) for place in range(len(tokens))]}


def reply_message(reading: Reading) -> dict[str, Any]:
    """Return a parsed completion as a message in OpenAI's format, with an id for each tool call."""
    calls = [{"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {
        "name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}} for call in reading.calls]
    content = reading.content if reading.content or not calls else None
    return {"role": "assistant", "content": content, "refusal": None, **({"tool_calls": calls} if calls else {})}


async def unrecorded(choices: list[Choice]) -> None:
    """Record nothing; the default of `record`."""


def params_of(asked: CompletionRequest, prompt: int, place: int, context: int) -> SamplingParams:
    """Return the sampling params of completion `place` of a prompt of `prompt` tokens. ChatError if no room is left."""
    room, field = context - prompt, asked.field
    if room < 1:
        raise ChatError(
            400, f"This model's maximum context length is {context} tokens. However, your {field} resulted in {prompt} "
            f"tokens. Please reduce the length of the {field}, or load the model with a larger max_seq_length", field,
            "context_length_exceeded")
    seed = None if asked.seed is None else random.Random(f"{asked.seed}-{place}").getrandbits(62)
    return SamplingParams(max_tokens=min(room, asked.bound or room), seed=seed, **asked.sampling)


def event(data: dict[str, Any]) -> bytes:
    """Encode an object as a server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
