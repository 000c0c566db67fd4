"""How an engine spends its time: on prompts, on steps of many sequences, and on the tail, steps of few as long as
these.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from lowmem_grpo.memory.time_plan import TAIL

PHASES = ("prefill", "full", "tail")


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
