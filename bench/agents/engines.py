"""Engines for a flood of requests: one that says a part of its prompt again, and a record of what any engine drew."""

import re
import threading
from collections import Counter
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Conversation, Engine, OnGroup, Request
from lowmem_grpo.engines.rounds import in_rounds
from lowmem_grpo.types import Rollout

WORD = re.compile(r"w\d+-\d+-[0-9a-f]{8}")  # what each request has of its own


class Echo:
    """Answers with the last word of the prompt that is like WORD, whatever the weights are."""

    name, slots, kv_bytes = "transformers", 64, 0
    capabilities = frozenset({"on_group", "converse"})

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        found = [[self.answer(ids)] for ids in prompts]
        for index, rollouts in enumerate(found):
            if on_group is not None:
                on_group(index, rollouts)
        return found

    def answer(self, prompt: list[int]) -> Rollout:
        text = f"heard {WORD.findall(self.tokenizer.decode(prompt))[-1]}"
        ids = [*self.tokenizer(text, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]
        return Rollout(ids, [-0.5] * len(ids), "stop", text)

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        in_rounds(self, conversation, params, self.tokenizer)

    def on_policy_update(self, policy_version: int) -> None:
        pass

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass


class Recorded:
    """Another engine, and all that was drawn by it: hashes of (prompt, completion, log-probabilities), counted."""

    def __init__(self, engine: Engine | Any) -> None:
        self.engine, self.name = engine, engine.name
        self.drawn: Counter[int] = Counter()
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        self.engine.converse(Noted(conversation, self), params)

    def note(self, prompt: list[int], completion: list[int], logprobs: list[float]) -> None:
        with self.lock:
            self.drawn[mark(prompt, completion, logprobs)] += 1


class Noted:
    """A conversation whose turns are noted on their way."""

    def __init__(self, conversation: Conversation, record: Recorded) -> None:
        self.conversation, self.record = conversation, record
        self.prompts: dict[int, list[int]] = {}

    def take(self, busy: bool) -> list[Request]:
        requests = self.conversation.take(busy)
        self.prompts |= {request.key: list(request.ids) for request in requests}
        return requests

    def give(self, key: int, rollout: Rollout) -> None:
        self.record.note(self.prompts.pop(key), rollout.completion_ids, rollout.rollout_logprobs)
        self.conversation.give(key, rollout)


def mark(prompt: list[int], completion: list[int], logprobs: list[float]) -> int:
    """What stands for a turn in the record."""
    return hash((tuple(prompt), tuple(completion), tuple(logprobs)))
