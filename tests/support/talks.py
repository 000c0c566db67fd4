"""Episodes whose prompts and answers between the turns are given: a conversation that an engine can serve."""

from collections.abc import Callable
from dataclasses import dataclass, field

from lowmem_grpo.engines.base import Request
from lowmem_grpo.types import Rollout


@dataclass
class Talk:
    """One episode for each prompt, each of `turns` turns; `reply(key, turn)` is what follows a turn."""

    prompts: list[list[int]]
    turns: int = 3
    reply: Callable[[int, int], list[int]] = lambda key, turn: [40 + key, 41 + turn, 42]
    max_tokens: Callable[[int, int], int] = lambda key, turn: 8
    wait: Callable[[int, int], bool] = lambda key, turn: False  # whether the turn is held back until nothing runs
    on_give: Callable[[int, Rollout], None] = lambda key, rollout: None
    drawn: dict[int, list[Rollout]] = field(default_factory=dict)  # of each key
    asked: list[Request] = field(default_factory=list)
    given: list[int] = field(default_factory=list)  # keys, in order
    goes_on: bool = False
    takes: list[tuple[bool, int]] = field(default_factory=list)  # whether the engine was busy, and how many it got

    def __post_init__(self) -> None:
        self.ready = [self.request(key, ids, 0) for key, ids in enumerate(self.prompts)]
        self.held: list[Request] = []

    def request(self, key: int, ids: list[int], turn: int) -> Request:
        return Request(key, ids, self.max_tokens(key, turn), seed=1000 * key + turn)

    def take(self, busy: bool) -> list[Request]:
        if not busy:
            self.ready, self.held = self.ready + self.held, []
        found, self.ready = sorted(self.ready, key=lambda request: request.key), []
        self.takes.append((busy, len(found)))
        self.asked += found
        return found

    def give(self, key: int, rollout: Rollout) -> None:
        self.given.append(key)
        self.on_give(key, rollout)
        done = self.drawn.setdefault(key, [])
        done.append(rollout)
        if len(done) < self.turns:
            turn = len(done)
            last = [request for request in self.asked if request.key == key][-1]
            following = self.request(key, last.ids + rollout.completion_ids + self.reply(key, turn), turn)
            (self.held if self.wait(key, turn) else self.ready).append(following)

    @property
    def ids(self) -> dict[int, list[list[int]]]:
        """The tokens of each turn of each episode."""
        return {key: [rollout.completion_ids for rollout in rollouts] for key, rollouts in sorted(self.drawn.items())}
