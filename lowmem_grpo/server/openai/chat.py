"""`Chat`: chat completions in OpenAI's shape, by the worker that owns the engine; and those of plain prompts."""

import copy
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.engines.request_output import Logprob
from lowmem_grpo.environments.template import RendererError
from lowmem_grpo.environments.tools.forms import ToolFormError
from lowmem_grpo.environments.tools.parsers import Reading
from lowmem_grpo.server.errors import ChatError
from lowmem_grpo.server.openai.conversation_cache import ConversationCache, PromptState
from lowmem_grpo.server.openai.engine_worker import EngineWorker
from lowmem_grpo.server.openai.messages import message_of, turn_named
from lowmem_grpo.server.openai.pending import Choice, Completer, PendingCompletions, TokenTexts
from lowmem_grpo.server.openai.request import ChatRequest, TextRequest
from lowmem_grpo.types import Turn

Names = Callable[[], Mapping[str, Path | str | None]]  # returns the adapter of each model by name, as `Call` has it


class Chat(Completer):
    """Answers requests for chats. Each answer names its turn, which `turn` looks up. What a request leaves out is
    sampled as in training: temperature 1, nothing cut off. max_tokens is an upper bound: with less room, an answer ends
    there ("length")."""

    def __init__(
        self, worker: EngineWorker, tokenizer: PreTrainedTokenizerBase, names: Names, *,
        histories: ConversationCache | None = None, max_turn_tokens: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        parse: Callable[..., Any] | str | None = None,
    ) -> None:
        """`names` is asked at each request. `max_turn_tokens` bounds every answer. `template_kwargs` and `parse`
        belong to the histories that are made here where none are given."""
        if histories is not None and (template_kwargs or parse):
            raise ValueError("template_kwargs and parse are settings of the ConversationCache: give them to it")
        if max_turn_tokens is not None and max_turn_tokens < 1:
            raise ValueError(f"max_turn_tokens is {max_turn_tokens}; it must be 1 or above, or None")
        self.worker, self.names, self.max_turn_tokens = worker, names, max_turn_tokens
        self.histories = histories or ConversationCache(tokenizer, template_kwargs=template_kwargs, parse=parse)
        self.texts = TokenTexts(copy.deepcopy(tokenizer))

    def models(self) -> list[str]:
        return list(self.names())

    def turn(self, name: str) -> Turn | None:
        """A turn by its name, as the engine returned it; None where it is not held (any more)."""
        return self.histories.turn(name)

    def parent(self, name: str) -> str | None:
        """The name of the turn that a turn continues."""
        return self.histories.parent(name)

    def start_request(self, body: Mapping[str, Any], session: str) -> "PendingChat":
        asked = ChatRequest.from_body(body)
        adapter = self.adapter(asked.model)
        try:
            opening = self.histories.open_prompt(asked.messages, asked.tools, session, asked.model,
                                           asked.chat_template_kwargs, turn_named(body["messages"]))
        except (RendererError, ToolFormError) as error:
            raise ChatError(400, str(error), "tools" if isinstance(error, ToolFormError) else "messages") from error
        try:
            return PendingChat(self, asked, opening, adapter)
        except ChatError:
            self.histories.close_prompt(opening, kept=False)
            raise

    def adapter(self, model: str) -> Path | str | None:
        """The adapter of a model by its name, as `Call` has it. ChatError for a name that is not served."""
        names = self.names()
        if model not in names:
            raise ChatError(404, f"the model {model!r} is not served here; there are {', '.join(names)}", "model",
                            "model_not_found")
        return names[model]


class PendingChat(PendingCompletions):
    """The answers to one request, each a turn of its conversation."""

    prefix, whole, piece = "chatcmpl", "chat.completion", "chat.completion.chunk"
    asked: ChatRequest

    def __init__(self, chat: Chat, asked: ChatRequest, opening: PromptState, adapter: Path | str | None) -> None:
        self.histories, self.opening, self.kept = chat.histories, opening, False
        super().__init__(chat.worker, chat.texts, asked, [opening.ids], adapter, chat.max_turn_tokens,
                         lambda place: opening.key if place == 0 else chat.histories.next_key())

    async def answer(self, place: int) -> tuple[Turn, Choice]:
        asked, (turn, likeliest) = self.asked, await self.drawn(place)
        reading = self.histories.read(self.opening, turn) if asked.tool_choice != "none" else Reading(turn.text)
        if not asked.parallel_tool_calls:
            reading.calls = reading.calls[:1]
        turn = replace(turn, calls=len(reading.calls) + len(reading.errors), failures=len(reading.errors))
        message = reply_message(reading)
        turn.message = message_of(message, "message")  # as it is read when the client sends it back
        return turn, {
            "index": place, "message": message, "finish_reason": "tool_calls" if reading.calls else turn.finish_reason,
            "logprobs": self.logprobs(turn, likeliest)}

    def keep(self, turn: Turn, choice: Choice) -> Choice:
        """Hold the turn, under a name that its choice then carries."""
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


class TextCompletions(Completer):
    """Answers requests for plain prompts, as OpenAI's older interface does, with the worker and models of a Chat. A
    prompt is continued as it is, without a template: its tokens are the tokenizer's, or the request's own."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    def start_request(self, body: Mapping[str, Any], session: str) -> "PendingTexts":
        asked = TextRequest.from_body(body)
        chat, adapter = self.chat, self.chat.adapter(asked.model)
        prompts = [chat.texts.encode(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompt]
        if empty := [place for place, ids in enumerate(prompts) if not ids]:
            raise ChatError(400, f"prompt {empty[0]} has no tokens; it must have at least one", "prompt")
        return PendingTexts(chat.worker, chat.texts, asked, prompts, adapter, chat.max_turn_tokens)


class PendingTexts(PendingCompletions):
    """The completions of one request's prompts."""

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


def model_entry(name: str, created: int = 0) -> dict[str, Any]:
    """Return a model as a list of models in OpenAI's form has it."""
    return {"id": name, "object": "model", "created": created, "owned_by": "lowmem-grpo"}


def reply_message(reading: Reading) -> dict[str, Any]:
    """Return what a completion says and calls as a message in OpenAI's form; each call has an id."""
    calls = [{"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {
        "name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}} for call in reading.calls]
    content = reading.content if reading.content or not calls else None
    return {"role": "assistant", "content": content, "refusal": None, **({"tool_calls": calls} if calls else {})}
