"""`ChatHandler`: OpenAI-compatible completions of chats and plain prompts, by the worker that owns the engine."""

import asyncio
import copy
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateError

from lowmem_grpo.config.sampling import SamplingParams, seed_of
from lowmem_grpo.engines.request_output import Logprob
from lowmem_grpo.environments.renderer import Renderer
from lowmem_grpo.environments.template import RendererError
from lowmem_grpo.environments.tools.forms import Reads, ToolFormError
from lowmem_grpo.environments.tools.parsers import Reading
from lowmem_grpo.server.openai.conversation_cache import ConversationCache
from lowmem_grpo.server.openai.engine_worker import EngineWorker
from lowmem_grpo.server.openai.request import ChatRequest, CompletionRequest, TextRequest, message_of
from lowmem_grpo.server.openai.request_queue import EngineCall, WorkerClosedError
from lowmem_grpo.server.openai.streaming import CallStream, merged
from lowmem_grpo.server.openai.token_texts import TokenTexts, older_logprobs
from lowmem_grpo.server.requests import ChatError, without_place
from lowmem_grpo.types import Turn
from lowmem_grpo.utils import JsonError, check_json

Adapter = Path | str | None  # as in `EngineCall`
Choice = dict[str, Any]
T = TypeVar("T")
SECONDS = 60.0  # until a request that is not yet rendered and encoded is given up
Record = Callable[[list[Choice]], Awaitable[None]]
DONE = b"data: [DONE]\n\n"  # the last event of a stream


def abandon(starting: "Future[PendingCompletions]") -> None:
    """Finish a request that was started after nobody waited for it any more."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().finish_request()


async def unrecorded(choices: list[Choice]) -> None:
    """Do nothing: the default of the argument `record`."""


class ChatHandler:
    """Answers completion requests, from any thread and event loop. Each choice of a chat has an id in `turn`, by which
    the method `turn` returns the sampled tokens. Sampling defaults are those of training: temperature 1, no truncation.
    If the coroutine is cancelled, nothing is cached."""

    def __init__(
        self, worker: EngineWorker, names: Callable[[], Mapping[str, Adapter]], histories: ConversationCache,
        user: str = "",
    ) -> None:
        """`names` is called at each request, and returns the adapter of each model by the model's name. `user` is whose
        requests these are: users have turns in the worker."""
        self.worker, self.names, self.histories, self.user = worker, names, histories, user
        self.texts = TokenTexts(copy.deepcopy(worker.tokenizer))
        # what a request makes this thread do, its user's other requests wait for, and no one else
        self.thread = ThreadPoolExecutor(1, "lowmem_grpo requests")

    @cached_property
    def stream_texts(self) -> TokenTexts:
        """The texts of tokens for event loops, while the thread uses the tokenizer of `texts`."""
        return TokenTexts(copy.deepcopy(self.worker.tokenizer))

    def turn(self, name: str) -> Turn | None:
        """Return a turn by name, as the engine returned it; None if it is unknown or evicted."""
        return self.histories.turn(name)

    def parent(self, name: str) -> str | None:
        """Return the name of the turn that turn `name` continues; None if it continues no turn."""
        return self.histories.parent(name)

    async def create(
        self, body: Mapping[str, Any], session: str = "", record: Record = unrecorded, texts: bool = False,
    ) -> dict[str, Any]:
        """Return the JSON reply to a chat, or to plain prompts if `texts`, after awaiting `record` with the choices. If
        several cached turns match the chat, one of the same `session` is continued. Raises ChatError."""
        if body.get("stream") is True:
            raise ChatError(400, "stream is true; a stream comes from stream(), a whole reply from create()", "stream")
        pending = await self.started(body, session, texts)
        try:
            answers = await asyncio.gather(*map(pending.answer, range(len(pending.calls))))
            choices = [pending.keep(*answer) for answer in answers]
            await record(choices)
            return pending.reply(choices)
        finally:
            pending.finish_request()

    async def stream(
        self, body: Mapping[str, Any], session: str = "", record: Record = unrecorded, texts: bool = False,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a reply, as the tokens of its choices are sampled. A refused request raises ChatError
        before the first chunk. If the generator is closed, the engine stops sampling."""
        pending = await self.started({**body, "stream": True}, session, texts)
        try:
            async with aclosing(merged([pending.pieces(place) for place in range(len(pending.calls))])) as pieces:
                async for piece in pieces:
                    if piece["finish_reason"] is not None:
                        await record([pending.choices[piece["index"]]])
                    yield pending.chunk([piece])
            if pending.asked.stream_options.get("include_usage"):
                yield pending.chunk([], pending.usage())
        finally:
            pending.finish_request()

    async def started(self, body: Mapping[str, Any], session: str, texts: bool) -> "PendingCompletions":
        """Start a request in the thread, within SECONDS. No thread can be killed, so what is long is refused there
        before it is rendered or encoded: the time limit is for what the bounds do not foresee."""
        starting = self.thread.submit(self.start_request, body, session, texts)
        try:
            async with asyncio.timeout(SECONDS):
                return await asyncio.wrap_future(starting)
        except BaseException as error:
            starting.add_done_callback(abandon)
            if isinstance(error, TimeoutError):
                raise ChatError(503, f"the request could not be read within {SECONDS:g} seconds; send a shorter "
                                     "one, or fewer at a time", None, "timeout") from None
            raise

    async def aside(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, function)

    def start_request(self, body: Mapping[str, Any], session: str, texts: bool) -> "PendingCompletions":
        """Parse a request and submit its calls to the worker. Raises ChatError."""
        kind = TextRequest if texts else ChatRequest
        try:
            check_json(body, nul=True)  # a policy may sample NUL
        except JsonError as error:
            raise ChatError(400, str(error), error.field or None, "invalid_value") from None
        self.texts.check_size(body, kind.field, self.worker.context)
        asked, names = kind.from_body(body), self.names()
        if asked.model not in names:
            raise ChatError(404, f"the model {asked.model!r} is not served here; there are {', '.join(names)}", "model",
                            "model_not_found")
        if isinstance(asked, TextRequest):
            return PendingCompletions(self, asked, names[asked.model])
        answers = [message for message in body["messages"] if message["role"] == "assistant"]
        turn = str(answers[-1].get("turn") or "") if answers else ""  # the last answer may name its turn
        return PendingChat(self, asked, names[asked.model], session, turn)


class PendingCompletions:
    """A request for completions of plain prompts (OpenAI's older API) in progress. The constructor submits its calls to
    the worker; `reply` and `chunk` format the results."""

    parser: Reads | Renderer | None = None  # of tool calls and thoughts
    prefix, whole, piece = "cmpl", "text_completion", "text_completion"  # id prefix; `object` of a reply, of a chunk

    def __init__(self, chat: ChatHandler, asked: TextRequest, adapter: Adapter) -> None:
        """ChatError if a prompt has no tokens, or leaves no room for an answer."""
        prompts = [chat.texts.encode(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompt]
        if empty := [place for place, ids in enumerate(prompts) if not ids]:
            raise ChatError(400, f"prompt {empty[0]} has no tokens; it must have at least one", "prompt")
        self.submit(chat, asked, adapter, prompts, [None] * asked.n)

    def submit(
        self, chat: ChatHandler, asked: CompletionRequest, adapter: Adapter, prompts: list[list[int]],
        keys: Sequence[int | None],
    ) -> None:
        """Submit a call for each pair of a prompt and a conversation key. ChatError if a prompt is too long."""
        step = asked.model.rpartition("@")[2]  # the policy version in a name such as RUN@12
        version = int(step) if step.isdecimal() else None
        self.chat, self.asked, self.turns = chat, asked, list[Turn]()
        self.calls = [EngineCall(ids, params_of(asked, len(ids), place, chat.worker.context), adapter, key, version,
                                 user=chat.user)
                      for ids in prompts for place, key in enumerate(keys)]
        self.streams = [CallStream(call, chat.stream_texts, self.parser) for call in self.calls if asked.stream]
        self.choices: dict[int, Choice] = {}  # of a stream, by index, those that are complete
        self.prompts: dict[int, list[dict[int, Logprob]]] = {}  # by call number, the tokens of its prompt if requested
        for call in self.calls:
            chat.worker.submit(call)
        self.head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": asked.model}

    async def drawn(self, place: int) -> tuple[Turn, dict[str, Any] | None]:
        """Await the turn of call number `place`, and OpenAI's logprobs if requested. ChatError if the call failed."""
        call, count, likeliest = self.calls[place], self.asked.likeliest, None
        try:
            turn = await asyncio.wrap_future(call.future)
            if count:
                likeliest = await asyncio.wrap_future(self.chat.worker.likeliest(call, turn, count))
            if self.asked.prompt_logprobs is not None:
                self.prompts[place] = await asyncio.wrap_future(
                    self.chat.worker.of_prompt(call, turn.policy_version, self.asked.prompt_logprobs))
        except WorkerClosedError as error:
            raise ChatError(503, str(error)) from error
        except ValueError as error:  # such as a temperature that vLLM would change
            raise ChatError(400, without_place(error, call.adapter)) from error
        except Exception as error:
            if isinstance(call.adapter, Path) and not call.adapter.exists():
                raise ChatError(404, "the weights of this model were deleted before it could answer", "model",
                                "model_not_found") from error
            said = "" if self.chat.user else f": {error}"  # which may name files of a server
            raise ChatError(500, f"the engine could not answer ({type(error).__name__}{said})") from error
        self.turns.append(turn)
        return turn, None if count is None else await self.chat.aside(
            partial(self.chat.texts.logprobs, turn.completion_ids, turn.logprobs, likeliest, count))

    async def answer(self, place: int) -> tuple[Turn, Choice]:
        """Await the turn of call number `place`, and return it with its choice."""
        turn, told = await self.drawn(place)
        choice = {"index": place, "text": turn.text, "finish_reason": turn.finish_reason,
                  "logprobs": None if told is None else self.logprobs(told["content"])}
        if self.asked.return_token_ids:
            choice |= {"prompt_token_ids": turn.prompt_ids, "token_ids": turn.completion_ids}
        if place in self.prompts:
            choice["prompt_logprobs"] = await self.chat.aside(partial(prompt_logprobs, self.prompts.pop(place)))
        return turn, choice

    def keep(self, turn: Turn, choice: Choice) -> Choice:
        """Return a turn's choice as it is sent to the client; for a chat, also cache the turn."""
        return choice

    def logprobs(self, content: list[dict[str, Any]], start: int = 0) -> dict[str, Any]:
        """Return the logprobs of tokens in the reply's format. The first token is at the character `start`."""
        return older_logprobs(content, bool(self.asked.likeliest), start)

    async def pieces(self, place: int) -> AsyncIterator[Choice]:
        """Yield a choice in parts, one for each chunk of a stream, while its tokens are sampled. The last part has the
        finish reason, and what is known of a whole completion only. ChatError if the call failed."""
        stream, opening = self.streams[place], self.opening(place)
        async for text in stream.pieces():
            for piece in opening:
                yield piece
            if text:
                told = self.logprobs(*stream.new_logprobs()) if self.asked.likeliest == 0 else None
                yield self.piece_of(place, text, told)
        self.choices[place] = choice = self.keep(*await self.answer(place))
        for piece in chain(opening, self.ending(choice, stream)):
            yield piece

    def opening(self, place: int) -> Iterator[Choice]:
        """Yield what is sent once the first tokens are there."""
        yield from ()

    def piece_of(self, place: int, text: str, logprobs: dict[str, Any] | None) -> Choice:
        return {"index": place, "text": text, "finish_reason": None, "logprobs": logprobs}

    def ending(self, choice: Choice, stream: CallStream) -> Iterator[Choice]:
        """Yield what was not sent before the completion's end."""
        yield choice | {"text": stream.rest(choice["text"]), "logprobs": stream.left(choice["logprobs"])}

    def usage(self) -> dict[str, Any]:
        """Return the token counts; each prompt counts once, however many completions it has."""
        prompt = sum(len(call.ids) for call in self.calls) // self.asked.n
        drawn = sum(len(turn.completion_ids) for turn in self.turns)
        return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}

    def reply(self, choices: list[Choice]) -> dict[str, Any]:
        return self.head | {"object": self.whole, "choices": choices, "usage": self.usage()}

    def chunk(self, choices: list[Choice], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        return self.head | {"object": self.piece, "choices": choices, "usage": usage}

    def finish_request(self) -> None:
        for call in self.calls:
            call.future.cancel()


class PendingChat(PendingCompletions):
    """A chat request in progress. Each answer becomes a turn of its conversation."""

    prefix, whole, piece = "chatcmpl", "chat.completion", "chat.completion.chunk"
    asked: ChatRequest

    def __init__(self, chat: ChatHandler, asked: ChatRequest, adapter: Adapter, session: str, turn: str) -> None:
        """`turn` names the turn to continue if several match. ChatError for a prompt that is invalid or too long."""
        self.histories, self.kept = chat.histories, False
        chat.texts.check_kwargs(asked.chat_template_kwargs)
        try:
            self.prompt = self.histories.open_prompt(asked.messages, asked.tools, session, asked.model,
                                                      asked.chat_template_kwargs, turn)
        except (RendererError, ToolFormError, TemplateError, TypeError) as error:
            raise ChatError(400, str(error), "tools" if isinstance(error, ToolFormError) else "messages") from error
        self.parser = self.prompt.dialect.reader(calls=asked.tool_choice != "none")
        try:
            self.submit(chat, asked, adapter, [self.prompt.ids],
                        [self.prompt.key, *islice(self.histories.keys, asked.n - 1)])
        except ChatError:
            self.histories.close_prompt(self.prompt, kept=False)
            raise

    async def answer(self, place: int) -> tuple[Turn, Choice]:
        asked, (turn, told) = self.asked, await self.drawn(place)
        reading = await self.chat.aside(partial(self.histories.read, self.parser, turn))
        if not asked.parallel_tool_calls:
            reading.calls = reading.calls[:1]
        turn = replace(turn, calls=len(reading.calls) + len(reading.errors), failures=len(reading.errors))
        message = reply_message(reading)
        turn.message = message_of(message, "message")  # in plain form, as it is read when the client sends it back
        return turn, {"index": place, "message": message, "logprobs": told,
                      "finish_reason": "tool_calls" if reading.calls else turn.finish_reason}

    def keep(self, turn: Turn, choice: Choice) -> Choice:
        self.kept = True
        choice["turn"] = self.histories.keep(self.prompt, turn, turn.message, self.calls[choice["index"]].key)
        choice["completion_tokens"] = len(turn.completion_ids)
        return choice | ({"token_ids": turn.completion_ids} if self.asked.return_token_ids else {})

    def logprobs(self, content: list[dict[str, Any]], start: int = 0) -> dict[str, Any]:
        return {"content": content, "refusal": None}

    def opening(self, place: int) -> Iterator[Choice]:
        yield self.piece_of(place, "", None, role="assistant")

    def piece_of(self, place: int, text: str, logprobs: dict[str, Any] | None, **more: Any) -> Choice:
        return {"index": place, "delta": more | {"content": text}, "finish_reason": None, "logprobs": logprobs}

    def ending(self, choice: Choice, stream: CallStream) -> Iterator[Choice]:
        message, rest = choice["message"], {name: value for name, value in choice.items() if name != "message"}
        text, rest["logprobs"] = stream.rest(message["content"] or ""), stream.left(choice["logprobs"])
        if thoughts := message.get("reasoning_content"):
            yield self.piece_of(choice["index"], "", None) | {"delta": {"reasoning_content": thoughts}}
        if text:
            yield self.piece_of(choice["index"], text, rest.pop("logprobs"))
        for place, call in enumerate(message.get("tool_calls", ())):
            yield self.piece_of(choice["index"], "", None) | {"delta": {"tool_calls": [{"index": place, **call}]}}
        yield {"delta": {}, "logprobs": None} | rest

    def usage(self) -> dict[str, Any]:
        cached = max((turn.cached_tokens for turn in self.turns), default=0)
        return super().usage() | {"prompt_tokens_details": {"cached_tokens": cached}}

    def reply(self, choices: list[Choice]) -> dict[str, Any]:
        return super().reply(choices) | ({"prompt_token_ids": self.prompt.ids} if self.asked.return_token_ids else {})

    def finish_request(self) -> None:
        super().finish_request()
        self.histories.close_prompt(self.prompt, self.kept)


def reply_message(reading: Reading) -> dict[str, Any]:
    """Return a parsed completion as a message in OpenAI's format, with an id for each tool call."""
    calls = [{"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {
        "name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}} for call in reading.calls]
    content = reading.content if reading.content or not calls else None
    thoughts = {"reasoning_content": reading.fields["thinking"]} if reading.fields.get("thinking") else {}
    return {"role": "assistant", "content": content, "refusal": None, **thoughts,
            **({"tool_calls": calls} if calls else {})}


def params_of(asked: CompletionRequest, prompt: int, place: int, context: int) -> SamplingParams:
    """Return the SamplingParams of completion number `place`. ChatError if `prompt` tokens fill the whole context."""
    room, field = context - prompt, asked.field
    if room < 1:
        raise ChatError(
            400, f"This model's maximum context length is {context} tokens. However, your {field} resulted in {prompt} "
            f"tokens. Please reduce the length of the {field}, or load the model with a larger max_seq_length", field,
            "context_length_exceeded")
    seed = None if asked.seed in (None, -1) else seed_of(asked.seed, place)
    try:
        return SamplingParams(max_tokens=min(room, asked.bound or room), seed=seed, **asked.sampling)
    except ValueError as error:  # its text begins with the field
        raise ChatError(400, str(error), str(error).partition(" ")[0], "invalid_value") from None


def prompt_logprobs(places: list[dict[int, Logprob]]) -> list[dict[int, dict[str, Any]] | None]:
    """Return the prompt's log-probabilities in vLLM's form: nothing for the first token, and for each later one an
    entry for itself and for the likeliest tokens. JSON has no -inf, which becomes -9999."""
    return [None, *({token: vars(entry) | {"logprob": max(entry.logprob, -9999.0)} for token, entry in place.items()}
                    for place in places)]


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def model_entry(name: str, created: int = 0) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "lowmem-grpo"}
