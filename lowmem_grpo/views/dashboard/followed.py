"""A run that is followed: its records as far as they were read, and what a page shows of them."""

import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from lowmem_grpo.runs.records import COMPLETIONS, METRICS, SUMMARY
from lowmem_grpo.units import count_text, size_text
from lowmem_grpo.views.chart import Chart
from lowmem_grpo.views.charts import figures
from lowmem_grpo.views.dashboard.appended import Appended
from lowmem_grpo.views.dashboard.checked_sample import checked_sample
from lowmem_grpo.views.dashboard.log_tail import log_tail
from lowmem_grpo.views.dashboard.plain_file import json_file
from lowmem_grpo.views.dashboard.series import Series
from lowmem_grpo.views.dashboard.spread import Spread
from lowmem_grpo.views.report import Content, LeftOut, content

Record = dict[str, Any]
Shown = TypeVar("Shown")

SAMPLES, NEWEST = 600, 200  # samples that are kept over the run, and of its end
JUDGED = 20_000  # samples whose rewards are kept for the curve of the accuracy
LAST_BYTES = 64 * 1024 * 1024  # of completions.jsonl that are read when a run is first looked at
LOOK_SECONDS = 0.25  # that a look reads; a long run is read in several
NOW = ("running", "killed", "silent")  # states that a summary does not know
UNFIT = (TypeError, KeyError, AttributeError, IndexError, ValueError, OverflowError)  # a summary of another form


class Followed:
    """Reads what a run appends. Several threads may ask it at a time."""

    def __init__(self, path: Path, log: Path | None = None) -> None:
        """`log` is where its output is kept, if anywhere."""
        self.path, self.log_path, self.lock = path, log, Lock()
        self.metrics = Appended(path / METRICS)
        self.completions = Appended(path / COMPLETIONS, LAST_BYTES)
        self.forget_steps()
        self.forget_samples()

    def forget_steps(self) -> None:
        self.series = Series()

    def forget_samples(self) -> None:
        self.samples, self.judged, self.logged = Spread(SAMPLES, NEWEST), Spread(JUDGED), 0

    def look(self, seconds: float = LOOK_SECONDS) -> None:
        """Read what is new for about so many seconds. `reading` says whether there is more."""
        until = time.monotonic() + seconds
        with self.lock:
            if self.metrics.look():
                self.forget_steps()
            for record, _ in self.metrics.records(until):
                self.series.add(record)
            if self.completions.look():
                self.forget_samples()
            for record, size in self.completions.records(until):
                self.take(checked_sample(record), size)

    @property
    def reading(self) -> bool:
        """Whether the last look did not reach the end of the records."""
        return self.metrics.more or self.completions.more

    def take(self, sample: Record, size: int) -> None:
        """A line of completions.jsonl."""
        self.logged += 1
        self.samples.add(sample, size)
        self.judged.add({key: sample[key] for key in ("step", "rewards", "replayed_from") if key in sample}, 100)

    def version(self) -> tuple[Any, ...]:
        """Changes whenever the page would."""
        files = (self.path / METRICS, self.path / COMPLETIONS, self.path / SUMMARY, self.log_path)
        return *map(stamp, files), self.metrics.place, self.completions.place

    def charts(self) -> list[Chart]:
        """The curves, as far as they were read."""
        with self.lock:
            rows, judged = self.series.rows(), self.judged.samples()
        return shown(lambda summary: figures(rows, judged, summary), json_file(self.path / SUMMARY))

    def content(self, state: str = "") -> Content:
        """What the page shows, as far as it was read. `state` is what is known beside the summary: that the run is
        running, killed or silent."""
        with self.lock:
            rows, samples = self.series.rows(), self.samples.samples()
            lacks = LeftOut(self.judged.samples(), self.logged, dict(self.series.warned), self.note(),
                            state if state in NOW else "")
        name = self.path.resolve().name
        return shown(lambda summary: content(name, rows, samples, summary, lacks), json_file(self.path / SUMMARY))

    def note(self) -> str:
        """What is left out, in words."""
        said = []
        if self.reading:
            share = self.metrics.place / max(1, self.metrics.size)
            said.append(f"Its records are still being read ({share:.0%} of the steps).")
        if self.series.width > 1:
            steps, width = count_text(self.series.steps, "step"), self.series.width
            said.append(f"Of {steps}, each {width} are drawn as their lowest and their highest value; medians above "
                        "and bold lines are of these.")
        if self.completions.skipped:
            said.append(f"Completions are read from the last {size_text(LAST_BYTES)} of their file.")
        if damaged := self.metrics.damaged + self.completions.damaged:
            said.append(f"{count_text(damaged, 'damaged line')} left out.")
        return " ".join(said)

    def log(self) -> str:
        """The end of its output, where somebody keeps it; empty otherwise."""
        return "" if self.log_path is None else log_tail(self.log_path)


def shown(of: Callable[[Record], Shown], summary: Record) -> Shown:
    """What is made of a summary; of one that has another form than a run writes, what is made without it."""
    try:
        return of(summary)
    except UNFIT:
        return of({})


def stamp(path: Path | None) -> tuple[int, int, int] | None:
    """Which file, how long, how new; None without one."""
    try:
        status = path.lstat() if path else None
    except OSError:
        return None
    return status and (status.st_ino, status.st_size, status.st_mtime_ns)
