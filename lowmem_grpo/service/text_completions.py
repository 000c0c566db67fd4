"""`TextCompletions`: completions of plain prompts in the shape of OpenAI's older interface."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from lowmem_grpo.engines.request_output import Logprob
from lowmem_grpo.service.call import Call
from lowmem_grpo.service.chat import Chat
from lowmem_grpo.service.drawing import Drawing, params_of, version_of
from lowmem_grpo.service.errors import ChatError
from lowmem_grpo.service.reply import TokenTexts
from lowmem_grpo.service.text_request import TextRequest
from lowmem_grpo.types import Turn


class TextCompletions:
    """Answers requests with the desk and the models of a Chat. A prompt is continued as it is: no template is put
    around it, and its tokens are those of the tokenizer, or the request's own."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    async def create(self, body: Mapping[str, Any], session: str = "") -> dict[str, Any]:
        """The JSON of a reply. ChatError in OpenAI's form."""
        asked = TextRequest.of(body)
        texts = self.begin(asked)
        try:
            choices = await asyncio.gather(*(texts.choice(place) for place in range(len(texts.calls))))
            return texts.head | {"choices": choices, "usage": texts.usage()}
        finally:
            texts.drawing.end()

    async def stream(self, body: Mapping[str, Any], session: str = "") -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a reply: each completion in one, as soon as it is drawn. A request that is refused raises
        ChatError before the first chunk."""
        asked = TextRequest.of(body)
        texts = self.begin(asked)
        try:
            for choice in asyncio.as_completed([texts.choice(place) for place in range(len(texts.calls))]):
                yield texts.head | {"choices": [await choice], "usage": None}
            if asked.stream_usage:
                yield texts.head | {"choices": [], "usage": texts.usage()}
        finally:
            texts.drawing.end()

    def begin(self, asked: TextRequest) -> "Texts":
        """Let the calls wait at the desk."""
        adapter = self.chat.adapter(asked.model)
        prompts = [self.chat.texts.encode(one) if isinstance(one, str) else one for one in asked.prompts]
        if empty := [place for place, ids in enumerate(prompts) if not ids]:
            raise ChatError(400, f"prompt {empty[0]} has no tokens; it must have at least one", "prompt")
        desk, most, version = self.chat.desk, self.chat.max_turn_tokens, version_of(asked.model)
        calls = [Call(ids, params_of(asked, len(ids), place, desk.context, most, "prompt"), adapter, version=version)
                 for ids in prompts for place in range(asked.n)]
        return Texts(asked, prompts, Drawing(desk, calls), self.chat.texts)


class Texts:
    """One request that is being answered."""

    def __init__(self, asked: TextRequest, prompts: list[list[int]], drawing: Drawing, texts: TokenTexts) -> None:
        self.asked, self.prompts, self.drawing, self.texts, self.calls = asked, prompts, drawing, texts, drawing.calls
        self.drawn: list[Turn] = []
        self.head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()),
                     "model": asked.model}

    async def choice(self, place: int) -> dict[str, Any]:
        """A completion, as soon as it is drawn."""
        asked = self.asked
        turn, likeliest = await self.drawing.turn(place, asked.top_logprobs)
        self.drawn.append(turn)
        ids = {"prompt_token_ids": turn.prompt_ids, "token_ids": turn.completion_ids} if asked.token_ids else {}
        logprobs = None if asked.top_logprobs is None else self.logprobs(turn, likeliest, asked.top_logprobs)
        return {"index": place, "text": turn.text, "finish_reason": turn.finish_reason, "logprobs": logprobs, **ids}

    def logprobs(self, turn: Turn, likeliest: list[dict[int, Logprob]] | None, count: int) -> dict[str, Any]:
        """Those of a turn as they were drawn, in the form of these replies."""
        places = self.texts.logprobs(turn, likeliest, count)["content"]
        tokens = [place["token"] for place in places]
        others = [{one["token"]: one["logprob"] for one in place["top_logprobs"]} for place in places]
        return {"tokens": tokens, "token_logprobs": [place["logprob"] for place in places],
                "top_logprobs": others if count else None,
                "text_offset": [sum(map(len, tokens[:place])) for place in range(len(tokens))]}

    def usage(self) -> dict[str, Any]:
        """Tokens of each prompt, once, and of the completions."""
        prompt, drawn = sum(map(len, self.prompts)), sum(len(turn.completion_ids) for turn in self.drawn)
        return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
