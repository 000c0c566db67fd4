"""`ChatHandler`: OpenAI-compatible completions of chats and plain prompts, by the worker that owns the engine."""

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowmem_grpo.environments.template import RendererError
from lowmem_grpo.environments.tools.forms import ToolFormError
from lowmem_grpo.server.openai.conversation_cache import ConversationCache
from lowmem_grpo.server.openai.engine_worker import EngineWorker
from lowmem_grpo.server.openai.pending import (
    PendingChat,
    PendingCompletions,
    PendingTexts,
    Record,
    TokenTexts,
    unrecorded,
)
from lowmem_grpo.server.openai.request import ChatRequest, CompletionRequest, TextRequest
from lowmem_grpo.server.requests import ChatError
from lowmem_grpo.types import Turn

Names = Callable[[], Mapping[str, Path | str | None]]  # returns `Call.adapter` of each model, by model name


class ChatHandler:
    """The handler of completion requests, from any thread and event loop. Each chat answer carries the name of its
    turn, which `turn` looks up. Sampling defaults are those of training: temperature 1, no truncation. max_tokens is an
    upper bound: an answer that reaches the context's end stops with "length". If the caller leaves (the coroutine is
    cancelled), no turn is kept."""

    def __init__(self, worker: EngineWorker, names: Names, histories: ConversationCache) -> None:
        """`names` is called at each request."""
        self.worker, self.names, self.histories = worker, names, histories
        self.texts = TokenTexts(copy.deepcopy(worker.tokenizer))

    def turn(self, name: str) -> Turn | None:
        """Return a turn by name, as the engine returned it; None if it is unknown or evicted."""
        return self.histories.turn(name)

    def parent(self, name: str) -> str | None:
        """Return the name of the turn that a turn continues; None if there is none."""
        return self.histories.parent(name)

    async def create(
        self, body: Mapping[str, Any], session: str = "", record: Record = unrecorded, texts: bool = False,
    ) -> dict[str, Any]:
        """Return the JSON reply to a chat, or to plain prompts if `texts`. A chat prefers to continue turns of its own
        `session`. `record` is awaited with the choices before they are returned. Raises ChatError."""
        if body.get("stream") is True:
            raise ChatError(400, "stream is true; a stream comes from stream(), a whole reply from create()", "stream")
        pending = self.start_request(body, session, texts)
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
        """Yield the chunks of a reply. The whole text of a choice is one chunk, as soon as its turn is sampled. A
        refused request raises ChatError before the first chunk."""
        pending = self.start_request({**body, "stream": True}, session, texts)
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

    def start_request(self, body: Mapping[str, Any], session: str, texts: bool) -> PendingCompletions:
        """Parse a request and submit its calls to the worker. Raises ChatError."""
        return self.start_texts(TextRequest.from_body(body)) if texts else self.start_chat(
            ChatRequest.from_body(body), session, turn_named(body["messages"]))

    def start_chat(self, asked: ChatRequest, session: str, turn: str) -> PendingChat:
        """Submit a chat request, which continues its conversation; `turn` decides if several cached turns match."""
        options = self.options(asked)
        try:
            opening = self.histories.open_prompt(asked.messages, asked.tools, session, asked.model,
                                                 asked.chat_template_kwargs, turn)
        except (RendererError, ToolFormError) as error:
            raise ChatError(400, str(error), "tools" if isinstance(error, ToolFormError) else "messages") from error
        try:
            return PendingChat(self.histories, opening, asked, **options)
        except ChatError:
            self.histories.close_prompt(opening, kept=False)
            raise

    def start_texts(self, asked: TextRequest) -> PendingTexts:
        """Submit a request of OpenAI's older completions API: plain prompts, without a chat template, each a text to
        tokenize or the request's own token ids."""
        options = self.options(asked)
        prompts = [self.texts.encode(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompt]
        if empty := [place for place, ids in enumerate(prompts) if not ids]:
            raise ChatError(400, f"prompt {empty[0]} has no tokens; it must have at least one", "prompt")
        return PendingTexts(asked, prompts, **options)

    def options(self, asked: CompletionRequest) -> dict[str, Any]:
        """Return the keyword arguments that PendingChat and PendingTexts share. ChatError for an unknown model."""
        names = self.names()
        if asked.model not in names:
            raise ChatError(404, f"the model {asked.model!r} is not served here; there are {', '.join(names)}", "model",
                            "model_not_found")
        return {"worker": self.worker, "texts": self.texts, "adapter": names[asked.model]}


def turn_named(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the turn name in the key `turn` of the last assistant message; empty if it has none."""
    last: Mapping[str, Any] = next((message for message in reversed(messages) if message["role"] == "assistant"), {})
    return str(last.get("turn") or "")


def model_entry(name: str, created: int = 0) -> dict[str, Any]:
    """Return a model's entry in OpenAI's list of models."""
    return {"id": name, "object": "model", "created": created, "owned_by": "lowmem-grpo"}
