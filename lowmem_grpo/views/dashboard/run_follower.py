"""A run that is followed: its records as far as they were read, and what a page shows of them."""

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from lowmem_grpo.runs.records import COMPLETIONS, METRICS, SUMMARY
from lowmem_grpo.units import count_text, size_text
from lowmem_grpo.views.chart import Chart
from lowmem_grpo.views.charts import figures
from lowmem_grpo.views.dashboard.jsonl_tail import JsonlTail
from lowmem_grpo.views.dashboard.plain_file import json_file, log_tail
from lowmem_grpo.views.dashboard.series import Series
from lowmem_grpo.views.report import RunSnapshot, content
from lowmem_grpo.views.samples import Reservoir, shown_sample

Record = dict[str, Any]
Shown = TypeVar("Shown")

SAMPLES, NEWEST = 600, 200  # samples that are kept over the run, and of its end
JUDGED = 20_000  # samples whose rewards are kept for the curve of the accuracy
LAST_BYTES = 64 * 1024 * 1024  # read from the end of completions.jsonl when a run is first looked at
PAGE_BYTES, PAGE_POINTS = 800_000, 15_000  # in a page that follows a run
NOW = ("running", "killed", "silent")  # states that a summary does not know
UNFIT = (TypeError, KeyError, AttributeError, IndexError, ValueError, OverflowError)  # a summary of another form


class RunFollower:
    """Reads what a run appends. Several threads may ask it at a time."""

    def __init__(self, path: Path, log: Path | None = None) -> None:
        """`log` is where its output is kept, if anywhere."""
        self.path, self.log_path, self.lock = path, log, Lock()
        self.metrics = JsonlTail(path / METRICS)
        self.completions = JsonlTail(path / COMPLETIONS, LAST_BYTES)
        self.forget_steps()
        self.forget_samples()

    def forget_steps(self) -> None:
        self.series = Series()

    def forget_samples(self) -> None:
        self.samples, self.judged, self.logged = Reservoir(SAMPLES, NEWEST), Reservoir(JUDGED), 0

    def read_news(self) -> None:
        """Read what is new, of each file at most one piece. `reading` says whether there is more."""
        with self.lock:
            if self.metrics.is_new_file():
                self.forget_steps()
            for record in self.metrics.read_records():
                self.series.add_record(record)
            if self.completions.is_new_file():
                self.forget_samples()
            for record in self.completions.read_records():
                self.add_sample(shown_sample(record))

    @property
    def reading(self) -> bool:
        return self.metrics.more or self.completions.more

    def add_sample(self, sample: Record) -> None:
        self.logged += 1
        self.samples.add_sample(sample)
        self.judged.add_sample({key: sample[key] for key in ("step", "rewards", "replayed_from") if key in sample})

    def version(self) -> tuple[Any, ...]:
        files = (self.path / METRICS, self.path / COMPLETIONS, self.path / SUMMARY, self.log_path)
        return *map(stamp, files), self.metrics.place, self.completions.place, self.reading

    def charts(self) -> list[Chart]:
        """Return the curves, as far as they were read."""
        with self.lock:
            rows, judged = self.series.rows(), self.judged.samples()
        return from_summary(lambda summary: figures(rows, judged, summary), json_file(self.path / SUMMARY))

    def content(self, state: str = "") -> Record:
        """Return what the page shows, as far as it was read. `state` is what is known beside the summary: that the run
        is running, killed or silent."""
        with self.lock:
            snapshot = RunSnapshot(
                self.path.resolve().name, self.series.rows(), self.samples.samples(), self.judged.samples(),
                self.logged, dict(self.series.warned), self.note(), state if state in NOW else "")
        return from_summary(lambda summary: content(snapshot, summary, PAGE_BYTES, PAGE_POINTS),
                            json_file(self.path / SUMMARY))

    def note(self) -> str:
        """Return what is left out, in words."""
        said = []
        if self.reading:
            share = self.metrics.place / max(1, self.metrics.size)
            said.append(f"Its records are still being read ({share:.0%} of the steps).")
        if self.series.width > 1:
            steps, width = count_text(self.series.steps, "step"), self.series.width * 2
            said.append(f"Of {steps}, each {width} are drawn as their lowest and their highest value; medians above "
                        "and bold lines are of these.")
        if self.completions.skipped:
            said.append(f"Completions are read from the last {size_text(LAST_BYTES)} of their file.")
        if damaged := self.metrics.damaged + self.completions.damaged:
            said.append(f"{count_text(damaged, 'damaged line')} left out.")
        return " ".join(said)

    def log(self) -> str:
        """Return the end of its output, where somebody keeps it; empty otherwise."""
        return "" if self.log_path is None else log_tail(self.log_path)


def from_summary(make: Callable[[Record], Shown], summary: Record) -> Shown:
    """Return what is made of a summary; of one that has another form than a run writes, what is made without it."""
    try:
        return make(summary)
    except UNFIT:
        return make({})


def stamp(path: Path | None) -> tuple[int, int, int] | None:
    """Return which file, how long, how new; None without one."""
    try:
        status = path.lstat() if path else None
    except OSError:
        return None
    return status and (status.st_ino, status.st_size, status.st_mtime_ns)
