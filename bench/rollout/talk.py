"""Episodes whose prompts and answers between the turns are random tokens: a conversation that an engine can serve."""

import random
from dataclasses import dataclass, field

from lowmem_grpo.engines.base import Request
from lowmem_grpo.types import Rollout

TOKENS = range(5, 300)  # ids that every model here has


def random_ids(count: int, seed: int) -> list[int]:
    """So many tokens."""
    return random.Random(seed).choices(TOKENS, k=count)


@dataclass
class Talk:
    """An episode for each prompt, of `turns` turns of `sampled` tokens, with `between` tokens from one to the next."""

    prompts: list[list[int]]
    turns: int
    sampled: int
    between: int = 0
    ready: list[Request] = field(default_factory=list)
    last: dict[int, Request] = field(default_factory=dict)  # that each episode asked for
    given: dict[int, list[Rollout]] = field(default_factory=dict)  # the turns of each episode
    computed: int = 0  # tokens that the engine fed to the model

    def __post_init__(self) -> None:
        for key, ids in enumerate(self.prompts):
            self.ask(key, ids)

    def ask(self, key: int, ids: list[int]) -> None:
        turns = self.given.setdefault(key, [])
        self.last[key] = Request(key, ids, self.sampled, seed=1000 * key + len(turns))
        self.ready.append(self.last[key])

    def take(self, busy: bool) -> list[Request]:
        found, self.ready = sorted(self.ready, key=lambda request: request.key), []
        return found

    def give(self, key: int, rollout: Rollout) -> None:
        ids = self.last[key].ids
        self.computed += len(ids) - rollout.cached_tokens + len(rollout.completion_ids) - 1  # the last one is not fed
        self.given[key].append(rollout)
        if len(self.given[key]) < self.turns:
            between = random_ids(self.between, seed=10_000 * key + len(self.given[key]))
            self.ask(key, ids + rollout.completion_ids + between)

    @property
    def new(self) -> int:
        """The tokens of all episodes, each counted once, that have to be fed."""
        return sum(len(self.last[key].ids) + len(turns[-1].completion_ids) - 1 for key, turns in self.given.items())
