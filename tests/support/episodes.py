"""Episodes made by hand, and conversations that an engine can serve."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lowmem_grpo.engines.base import Request
from lowmem_grpo.types import Rollout, Turn

CALL = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": 7}}}


def turn(text: str, *replies: dict[str, Any], reward: float | None = None, **more: Any) -> Turn:
    """A turn that sampled two tokens, and what came back; `episode` gives it its prompt."""
    made = Turn([], [11, 12], [-0.5, -0.25], "stop", text, replies=list(replies), reward=reward, **more)
    made.message = {"role": "assistant", "content": text}
    return made


def episode(*turns: Turn, ending: str = "done", context: int = 3, **more: Any) -> Rollout:
    """The rollout of these turns after a prompt of three tokens, with so many of context between two turns."""
    ids, logprobs, trained = [], [], []  # type: ignore[var-annotated]
    for number, each in enumerate(turns):
        gap = context if number else 0
        each.prompt_ids = [1, 2, 3, *ids, *[9] * gap]
        ids += [9] * gap + each.completion_ids
        logprobs += [0.0] * gap + each.logprobs
        trained += [False] * gap + [True] * len(each.completion_ids)
    text = turns[-1].text if turns else ""
    return Rollout(ids, logprobs, "stop", text, trained=trained, turns=list(turns), ending=ending, **more)


def game(**more: Any) -> Rollout:
    """Two guesses, the second of which is right."""
    lower, right = ({"role": "user", "content": content} for content in ("Lower.", "Right!"))
    return episode(turn("50", lower, reward=0.0, seconds=0.1), turn("25", right, reward=1.0, cached_tokens=8), **more)


def tool_use(**more: Any) -> Rollout:
    """A call of a tool, and the answer that follows."""
    result = {"role": "tool", "name": "multiply", "content": "42"}
    asked = turn("6 times 7", result, calls=1, seconds=0.2)
    asked.message["tool_calls"] = [CALL]
    return episode(asked, turn("The answer is 42."), ending="answer", **more)


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
    listen: Callable[[int, list[int], list[float]], bool] | None = None  # `on_tokens` of each request, with its key
    takes: list[tuple[bool, int]] = field(default_factory=list)  # whether the engine was busy, and how many it got

    def __post_init__(self) -> None:
        self.ready = [self.request(key, ids, 0) for key, ids in enumerate(self.prompts)]
        self.held: list[Request] = []

    def request(self, key: int, ids: list[int], turn: int) -> Request:
        on_tokens = None if self.listen is None else partial(self.listen, key)
        return Request(key, ids, self.max_tokens(key, turn), seed=1000 * key + turn, on_tokens=on_tokens)

    def next_requests(self, busy: bool) -> list[Request]:
        if not busy:
            self.ready, self.held = self.ready + self.held, []
        found, self.ready = sorted(self.ready, key=lambda request: request.key), []
        self.takes.append((busy, len(found)))
        self.asked += found
        return found

    def add_rollout(self, key: int, rollout: Rollout) -> None:
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


class Interrupted(Talk):
    """Each turn leaves the engine whenever it has drawn three tokens, and goes on with the next requests."""

    def __post_init__(self) -> None:
        self.new, self.listen = dict.fromkeys(range(len(self.prompts)), 0), self.few
        super().__post_init__()

    def few(self, key: int, tokens: list[int], logprobs: list[float]) -> bool:
        self.new[key] += len(tokens)
        return self.new[key] < 3

    def add_rollout(self, key: int, rollout: Rollout) -> None:
        interrupted, self.new[key] = self.new[key] >= 3, 0
        if interrupted:
            (request,) = [request for request in self.asked if request.key == key][-1:]
            self.ready.append(replace(request, begun=rollout))
        else:
            super().add_rollout(key, rollout)
