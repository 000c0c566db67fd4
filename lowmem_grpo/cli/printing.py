"""Answers that `lowmem-grpo generate` prints while they are sampled."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompt_inputs import encoded
from lowmem_grpo.engines.base import Request
from lowmem_grpo.engines.decoding import converse
from lowmem_grpo.engines.text_stream import TextStream
from lowmem_grpo.fast_model import adapter_for
from lowmem_grpo.types import Rollout


class PrintedAnswers:
    """The `Conversation` of an engine that samples n answers to one prompt side by side. They are printed one after the
    other: the first one token by token, and each later one up to where it is, and then token by token.

    `say` is called in the engine's thread, which waits for it."""

    def __init__(self, ids: list[int], params: SamplingParams, tokenizer: Any, say: Callable[[str], None]) -> None:
        seeds = params.seeds or [random.getrandbits(62) for _ in range(params.n)]
        self.ready = [Request(place, ids, params.max_tokens, seed, partial(self.hear, place))
                      for place, seed in enumerate(seeds)]
        self.streams = [TextStream(tokenizer, params) for _ in seeds]
        self.unsaid = [""] * params.n
        self.now, self.ended, self.say = 0, set[int](), say

    def next_requests(self, busy: bool) -> list[Request]:
        ready, self.ready = self.ready, []
        return ready

    def hear(self, place: int, ids: list[int], logprobs: list[float]) -> bool:
        self.put(place, self.streams[place].add(ids))
        return True

    def add_rollout(self, key: int, rollout: Rollout) -> None:
        self.put(key, self.streams[key].finish(rollout.text) + "\n")
        self.ended.add(key)
        while self.now in self.ended and self.now + 1 < len(self.unsaid):
            self.now += 1
            self.put(self.now, "")

    def put(self, place: int, text: str) -> None:
        """Print an answer's text if its turn has come; else keep it."""
        self.unsaid[place] += text
        if place == self.now and self.unsaid[place]:
            self.say(self.unsaid[place])
            self.unsaid[place] = ""


def print_answers(model: Any, prompts: Any, params: SamplingParams, request: Any, say: Callable[[str], None]) -> None:
    """Sample `params.n` answers to a prompt as `fast_generate` does, and pass their text to `say` as it comes."""
    tokenizer = model.loaded.tokenizer
    ((_, ids),) = encoded(tokenizer, prompts, model.inner.config.get_text_config().vocab_size)
    answers = PrintedAnswers(ids, params, tokenizer, say)
    with adapter_for(model.inner, request):
        converse(model.engine(), answers, replace(params, n=1), tokenizer)
