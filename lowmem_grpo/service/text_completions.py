"""`TextCompletions`: completions of plain prompts in the shape of OpenAI's older interface."""

from collections.abc import Mapping
from typing import Any

from lowmem_grpo.engines.request_output import Logprob
from lowmem_grpo.service.chat import Chat
from lowmem_grpo.service.errors import ChatError
from lowmem_grpo.service.pending import Choice, Completer, PendingCompletions
from lowmem_grpo.service.request import TextRequest
from lowmem_grpo.types import Turn


class TextCompletions(Completer):
    """Answers requests with the desk and the models of a Chat. A prompt is continued as it is: no template is put
    around it, and its tokens are those of the tokenizer, or the request's own."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    def begin(self, body: Mapping[str, Any], session: str) -> "PendingTexts":
        asked = TextRequest.of(body)
        chat, adapter = self.chat, self.chat.adapter(asked.model)
        prompts = [chat.texts.encode(one) if isinstance(one, str) else one for one in asked.prompt]
        if empty := [place for place, ids in enumerate(prompts) if not ids]:
            raise ChatError(400, f"prompt {empty[0]} has no tokens; it must have at least one", "prompt")
        return PendingTexts(chat.desk, chat.texts, asked, prompts, adapter, chat.max_turn_tokens)


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
        others = [{one["token"]: one["logprob"] for one in place["top_logprobs"]} for place in places]
        return {"tokens": tokens, "token_logprobs": [place["logprob"] for place in places],
                "top_logprobs": others if self.asked.likeliest else None,
                "text_offset": [sum(map(len, tokens[:place])) for place in range(len(tokens))]}
