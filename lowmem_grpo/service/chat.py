"""`Chat`: chat completions in OpenAI's shape, by the desk that owns the engine."""

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.environments.template import RendererError
from lowmem_grpo.environments.tools.forms import ToolFormError
from lowmem_grpo.environments.tools.parsers import Reading
from lowmem_grpo.service.call import Call
from lowmem_grpo.service.desk import Desk
from lowmem_grpo.service.drawing import Drawing, params_of, version_of
from lowmem_grpo.service.errors import ChatError
from lowmem_grpo.service.histories import Histories, Opening
from lowmem_grpo.service.reply import Answer, Reply, TokenTexts
from lowmem_grpo.service.request import ChatRequest
from lowmem_grpo.types import Turn

Names = Callable[[], Mapping[str, Path | str | None]]  # of models: the adapter of each, as `Call` has it


class Chat:
    """Answers requests from any thread and event loop. Each answer names its turn, which `turn` looks up.

    What a request leaves out is sampled as in training: temperature 1, nothing cut off, as many tokens as there is room
    for. max_tokens is an upper bound: where less room is left, the answer ends there, with the reason "length".
    """

    def __init__(
        self, desk: Desk, tokenizer: PreTrainedTokenizerBase, names: Names, *, histories: Histories | None = None,
        max_turn_tokens: int | None = None, template_kwargs: Mapping[str, Any] | None = None,
        parse: Callable[..., Any] | str | None = None,
    ) -> None:
        """`names` is asked at each request. `max_turn_tokens` bounds every answer. `template_kwargs` and `parse`
        belong to the histories that are made here where none are given."""
        if histories is not None and (template_kwargs or parse):
            raise ValueError("template_kwargs and parse are settings of Histories: give them to the histories")
        if max_turn_tokens is not None and max_turn_tokens < 1:
            raise ValueError(f"max_turn_tokens is {max_turn_tokens}; it must be 1 or above, or None")
        self.desk, self.names, self.max_turn_tokens = desk, names, max_turn_tokens
        self.histories = histories or Histories(tokenizer, template_kwargs=template_kwargs, parse=parse)
        self.texts = TokenTexts(copy.deepcopy(tokenizer))

    def models(self) -> list[str]:
        """The names that a request may ask for."""
        return list(self.names())

    def turn(self, name: str) -> Turn | None:
        """A turn by its name, as the engine returned it; None where it is not held (any more)."""
        return self.histories.turn(name)

    def parent(self, name: str) -> str | None:
        """The name of the turn that a turn continues."""
        return self.histories.parent(name)

    async def create(self, body: Mapping[str, Any], session: str = "") -> dict[str, Any]:
        """The JSON of a reply. Turns of one `session` belong together. ChatError in OpenAI's form.

        Where the caller goes away (the coroutine is cancelled), nothing is kept.
        """
        asked = ChatRequest.of(body)
        if asked.stream:
            raise ChatError(400, "stream is true; a stream comes from stream(), a whole reply from create()", "stream")
        talk = self.begin(asked, session)
        try:
            reply = Reply(asked.model, talk.opening.ids, asked.token_ids)
            reply.answers += await asyncio.gather(*(talk.answer(place) for place in range(asked.n)))
            talk.keep(reply.answers)
            return reply.whole()
        finally:
            talk.end()

    async def stream(self, body: Mapping[str, Any], session: str = "") -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a reply. The text of a choice comes in one chunk, as soon as its turn is drawn. A request that
        is refused raises ChatError before the first chunk."""
        asked = ChatRequest.of({**body, "stream": True})
        talk = self.begin(asked, session)
        try:
            reply = Reply(asked.model, talk.opening.ids, asked.token_ids)
            for next_one in asyncio.as_completed([talk.answer(place) for place in range(asked.n)]):
                answer = await next_one
                talk.keep([answer])
                reply.answers.append(answer)
                for choice in answer.deltas():
                    yield reply.chunk([choice])
            if asked.stream_usage:
                yield reply.chunk([], reply.usage())
        finally:
            talk.end()

    def begin(self, asked: ChatRequest, session: str) -> "Talk":
        """Make the prompt, and let the calls wait at the desk."""
        adapter = self.adapter(asked.model)
        try:
            opening = self.histories.begin(asked.messages, asked.tools, session, asked.model, asked.template_kwargs,
                                           asked.turn)
        except (RendererError, ToolFormError) as error:
            raise ChatError(400, str(error), "tools" if isinstance(error, ToolFormError) else "messages") from error
        return Talk(self, asked, opening, adapter)

    def adapter(self, model: str) -> Path | str | None:
        """The adapter of a model by its name, as `Call` has it. ChatError for a name that is not served."""
        names = self.names()
        if model not in names:
            raise ChatError(404, f"the model {model!r} is not served here; there are {', '.join(names)}", "model",
                            "model_not_found")
        return names[model]


class Talk:
    """One request that is being answered."""

    def __init__(self, chat: Chat, asked: ChatRequest, opening: Opening, adapter: Path | str | None) -> None:
        self.chat, self.asked, self.opening = chat, asked, opening
        self.kept, self.drawing = 0, Drawing(chat.desk, ())
        version, prompt, most = version_of(asked.model), len(opening.ids), chat.max_turn_tokens
        try:
            self.calls = [
                Call(opening.ids, params_of(asked, prompt, place, chat.desk.context, most, "messages"), adapter,
                     opening.key if place == 0 else chat.histories.next_key(), version) for place in range(asked.n)]
        except ChatError:
            self.end()
            raise
        self.drawing = Drawing(chat.desk, self.calls)

    async def answer(self, place: int) -> Answer:
        """A choice, as soon as its turn is drawn."""
        asked = self.asked
        turn, likeliest = await self.drawing.turn(place, asked.top_logprobs)
        reading = self.chat.histories.read(self.opening, turn) if asked.reads_calls else Reading(turn.text)
        if not asked.parallel:
            reading.calls = reading.calls[:1]
        turn = replace(turn, calls=len(reading.calls) + len(reading.errors), failures=len(reading.errors))
        logprobs = None if asked.top_logprobs is None else self.chat.texts.logprobs(turn, likeliest, asked.top_logprobs)
        return Answer(place, turn, reading, logprobs, asked.token_ids)

    def keep(self, answers: list[Answer]) -> None:
        """Hold the turns, under names that the answers then carry."""
        for one in answers:
            one.turn.message = one.said
            one.name = self.chat.histories.keep(self.opening, one.turn, one.said, self.calls[one.index].key)
            self.kept += 1

    def end(self) -> None:
        """The request is answered, or nobody waits for the answer any more."""
        self.drawing.end()
        self.chat.histories.end(self.opening, self.kept > 0)
