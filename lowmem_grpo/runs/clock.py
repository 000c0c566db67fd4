"""`Clock`: the seconds of each phase of a step; `mean_of`: means over steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import fmean

from lowmem_grpo.memory.peaks import PhasePeaks


class Clock:
    """A stopwatch of the phases of a step since `restart`; all other time is idle. `peaks` measures the peak memory of
    each phase other than "reward"."""

    def __init__(self, peaks: PhasePeaks | None = None) -> None:
        self.peaks = peaks
        self.restart()

    def restart(self) -> None:
        self.started = time.perf_counter()
        self.seconds = {"generate": 0.0, "reward": 0.0, "train": 0.0}
        self.reward_hidden = 0.0  # reward seconds during sampling, counted as "generate"
        self.train_hidden: float | None = None  # training seconds during sampling, counted as "generate"
        self.tools: float | None = None  # seconds with nothing to decode while tools ran; None without tools

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time and memory of the block as this phase's."""
        began = time.perf_counter()
        try:
            with nullcontext() if self.peaks is None or name == "reward" else self.peaks.phase(name):
                yield
        finally:
            self.seconds[name] += time.perf_counter() - began

    def moved_to_train(self, seconds: float) -> None:
        """Move seconds from the phase "generate" to "train"."""
        self.seconds["train"] += seconds
        self.seconds["generate"] -= seconds

    def metrics(self) -> dict[str, float]:
        """Return the step time in seconds, and as shares of it each phase and the time hidden by sampling."""
        total = max(time.perf_counter() - self.started, 1e-9)
        shares = {f"time/{name}": seconds / total for name, seconds in self.seconds.items()}
        beside = {"time/tools": self.tools, "time/train_hidden": self.train_hidden}
        known = {name: seconds / total for name, seconds in beside.items() if seconds is not None}
        return {"step_time": total, **shares, "time/idle": max(0.0, 1 - sum(shares.values())),
                "time/reward_hidden": self.reward_hidden / total, **known}


def mean_of(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the steps that have it."""
    names = sorted({name for step in steps for name in step})
    return {name: fmean(step[name] for step in steps if name in step) for name in names}
