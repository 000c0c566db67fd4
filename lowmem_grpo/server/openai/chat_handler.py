"""`ChatHandler`: completions in OpenAI's shape, of chats and of plain prompts, by the worker that owns the engine."""

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any

from lowmem_grpo.environments.template import RendererError
from lowmem_grpo.environments.tools.forms import ToolFormError
from lowmem_grpo.server.errors import ChatError
from lowmem_grpo.server.openai.conversation_cache import ConversationCache
from lowmem_grpo.server.openai.engine_worker import EngineWorker
from lowmem_grpo.server.openai.messages import turn_named
from lowmem_grpo.server.openai.pending import (
    PendingChat,
    PendingCompletions,
    PendingTexts,
    Record,
    TokenTexts,
    unrecorded,
)
from lowmem_grpo.server.openai.request import ChatRequest, CompletionRequest, TextRequest
from lowmem_grpo.types import Turn

Names = Callable[[], Mapping[str, Path | str | None]]  # returns the adapter of each model by name, as `Call` has it


class ChatHandler:
    """Answers requests, from any thread and event loop. Each answer to a chat names its turn, which `turn` looks up.
    What a request leaves out is sampled as in training: temperature 1, nothing cut off. max_tokens is an upper bound:
    with less room, an answer ends there ("length"). Where the caller goes away (the coroutine is cancelled), nothing is
    kept."""

    def __init__(
        self, worker: EngineWorker, names: Names, histories: ConversationCache, max_turn_tokens: int | None = None,
    ) -> None:
        """`names` is asked at each request. `max_turn_tokens` bounds every answer."""
        self.worker, self.names, self.histories, self.max_turn_tokens = worker, names, histories, max_turn_tokens
        self.texts = TokenTexts(copy.deepcopy(worker.tokenizer))

    def models(self) -> list[str]:
        return list(self.names())

    def turn(self, name: str) -> Turn | None:
        """A turn by its name, as the engine returned it; None where it is not held (any more)."""
        return self.histories.turn(name)

    def parent(self, name: str) -> str | None:
        """The name of the turn that a turn continues."""
        return self.histories.parent(name)

    async def create(
        self, body: Mapping[str, Any], session: str = "", record: Record = unrecorded, texts: bool = False,
    ) -> dict[str, Any]:
        """Return the JSON of a reply, to a chat or to plain `texts`. Turns of one `session` belong together, and
        `record` is called with the choices that are about to be told. ChatError in OpenAI's form."""
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
        """Yield the chunks of a reply. The text of a choice comes in one, as soon as its turn is drawn. A request that
        is refused raises ChatError before the first chunk."""
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
        """Read a request, and let its calls wait at the worker. ChatError in OpenAI's form."""
        return self.start_texts(TextRequest.from_body(body)) if texts else self.start_chat(
            ChatRequest.from_body(body), session, turn_named(body["messages"]))

    def start_chat(self, asked: ChatRequest, session: str, turn: str) -> PendingChat:
        """Continue the conversation of a request, from the held turn called `turn` if there are several."""
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
        """Continue plain prompts, as OpenAI's older interface does, as they are, without a template: their tokens are
        the tokenizer's, or the request's own."""
        options = self.options(asked)
        prompts = [self.texts.encode(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompt]
        if empty := [place for place, ids in enumerate(prompts) if not ids]:
            raise ChatError(400, f"prompt {empty[0]} has no tokens; it must have at least one", "prompt")
        return PendingTexts(asked, prompts, **options)

    def options(self, asked: CompletionRequest) -> dict[str, Any]:
        """Return what every request's completions are made with. ChatError for a model that is not served."""
        names = self.names()
        if asked.model not in names:
            raise ChatError(404, f"the model {asked.model!r} is not served here; there are {', '.join(names)}", "model",
                            "model_not_found")
        return {"worker": self.worker, "texts": self.texts, "adapter": names[asked.model],
                "most": self.max_turn_tokens}


def model_entry(name: str, created: int = 0) -> dict[str, Any]:
    """Return a model as a list of models in OpenAI's form has it."""
    return {"id": name, "object": "model", "created": created, "owned_by": "lowmem-grpo"}
