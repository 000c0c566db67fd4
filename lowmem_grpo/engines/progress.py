"""How far an engine is: the prompts of a call that are finished, how long answers were, and where the time went."""

import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from statistics import fmean
from typing import Self

from lowmem_grpo.engines.base import Meanwhile, OnGroup
from lowmem_grpo.memory.time_plan import TAIL
from lowmem_grpo.types import Rollout

MOST_PROMPTS = 100_000  # that are remembered, at about 150 bytes each
# A call's time goes to prompts, to steps of many sequences, and to the tail, steps of few as long as these
PHASES = ("prefill", "full", "tail")


class Calls:
    """The calls that an engine makes to its caller while it samples, and whether one failed."""

    failed_outside: Exception | None = None  # an error of our own code or of the caller's, not of the engine

    @contextmanager
    def outside_the_engine(self) -> Iterator[None]:
        """An error raised inside is not the engine's: a new engine would meet it again."""
        try:
            yield
        except Exception as error:
            self.failed_outside = error
            raise


class FinishedPrompts(Calls):
    """The rollouts of the prompts that are finished. Each prompt is reported once, even if the call starts again."""

    def __init__(self, prompts: int, on_group: OnGroup | None, meanwhile: Meanwhile | None = None) -> None:
        self.prompts, self.on_group, self.meanwhile = prompts, on_group, meanwhile
        self.rollouts: dict[int, list[Rollout]] = {}

    def add(self, prompt: int, rollouts: list[Rollout]) -> None:
        """Keep and report all rollouts of a prompt."""
        assert prompt not in self.rollouts, prompt
        self.rollouts[prompt] = rollouts
        if self.on_group is not None:
            self.on_group(prompt, rollouts)

    def between(self, running: int) -> None:
        """Two steps of decoding are apart, and so many sequences are not finished."""
        if self.meanwhile is not None and running:
            with self.outside_the_engine():
                self.meanwhile(running)

    @property
    def missing(self) -> list[int]:
        return [prompt for prompt in range(self.prompts) if prompt not in self.rollouts]

    def result(self) -> list[list[Rollout]]:
        """The rollouts of all prompts, in the order of the prompts."""
        return [self.rollouts[prompt] for prompt in range(self.prompts)]


class ExpectedLengths:
    """Mean lengths of the last answers to each prompt; prompts that were sampled longest ago are forgotten first.

    Where not all sequences have room at once, those that will be long are begun first, as the call ends with those that
    were begun last. Nothing that is drawn depends on the order.
    """

    def __init__(self, most: int = MOST_PROMPTS) -> None:
        self.most = most
        self.known: OrderedDict[bytes, float] = OrderedDict()

    def note_groups(self, prompts: list[list[int]], groups: list[list[Rollout]]) -> None:
        """Note how long the answers of a call are."""
        for prompt, rollouts in zip(prompts, groups, strict=True):
            self.note(prompt, [len(rollout.completion_ids) for rollout in rollouts])

    def note(self, prompt: list[int], lengths: list[int]) -> None:
        key = key_of(prompt)
        self.known[key] = fmean(lengths)
        self.known.move_to_end(key)
        if len(self.known) > self.most:
            self.known.popitem(last=False)

    def order(self, prompts: list[list[int]]) -> list[int]:
        """The places of the prompts, the longest expected first. One that was never answered counts as the mean of the
        others; equals stay in the given order, as all do where nothing is known."""
        means = [self.known.get(key_of(prompt)) for prompt in prompts]
        usual = fmean([length for length in means if length is not None] or [0.0])
        lengths = [usual if length is None else length for length in means]
        return sorted(range(len(prompts)), key=lambda place: -lengths[place])


def key_of(prompt: list[int]) -> bytes:
    return blake2b(array("i", prompt).tobytes(), digest_size=16).digest()


@dataclass
class Spent:
    """The time of a phase, and the work done in it."""

    seconds: float = 0.0
    tokens: int = 0  # in prefill those of computed prompts, else tokens drawn


class Pace:
    """Seconds and tokens of an engine since they were last taken; `step` is called where its tokens are on the host
    anyway."""

    def __init__(self) -> None:
        self.spent = {name: Spent() for name in PHASES}
        self.preemptions = 0  # sequences that had to leave for want of cache, and are computed again
        self.most = 0  # sequences that ran together
        self.start_call()

    def start_call(self) -> None:
        """A call begins: what is wide is said by its own sequences."""
        self.widest = 0
        self.resume()

    def resume(self) -> None:
        """The time until now was not the engine's."""
        self.mark, self.reading = time.perf_counter(), False

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.mark += time.perf_counter() - began

    def read(self, tokens: int) -> None:
        """So many tokens of prompts are computed before the next `step`, whose time is prefill."""
        self.reading = True
        self.spent["prefill"].tokens += tokens

    def step(self, running: int, drawn: int | None = None) -> None:
        """A token step of so many sequences has ended. They drew a token each, or `drawn` together."""
        now = time.perf_counter()
        self.widest = max(self.widest, running)
        self.most = max(self.most, running)
        spent = self.spent["prefill" if self.reading else "tail" if self.in_tail(running) else "full"]
        spent.seconds += now - self.mark
        if not self.reading:
            spent.tokens += running if drawn is None else drawn
        self.mark, self.reading = now, False

    def in_tail(self, running: int) -> bool:
        return running < TAIL * self.widest

    def add(self, other: "Pace") -> None:
        for name, spent in other.spent.items():
            self.spent[name].seconds += spent.seconds
            self.spent[name].tokens += spent.tokens
        self.preemptions += other.preemptions
        self.most = max(self.most, other.most)

    def pop_measured(self) -> Self:
        """Return what was measured until now; it is not measured again."""
        taken = type(self)()
        taken.add(self)
        self.spent, self.preemptions, self.most = {name: Spent() for name in PHASES}, 0, 0
        return taken

    def metrics(self) -> dict[str, float]:
        """Return seconds of each phase, the share of the tail, and tokens a second; empty if nothing ran."""
        if not self.most:
            return {}
        seconds = {f"time/sampling/{name}_s": spent.seconds for name, spent in self.spent.items()}
        total = max(sum(seconds.values()), 1e-9)
        speeds = {f"tokens_per_second/{name}": spent.tokens / spent.seconds
                  for name, spent in self.spent.items() if spent.seconds}
        return {**seconds, "time/sampling/tail_share": self.spent["tail"].seconds / total, **speeds,
                "sampling/most_together": self.most, "sampling/preemptions": self.preemptions}
