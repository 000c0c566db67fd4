"""`RunFollower`: reads a run's growing files for the page. No file is trusted: it may be damaged, a link or a pipe."""

import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any, BinaryIO

from lowmem_grpo.runs.records import COMPLETIONS, METRICS, PICTURES, SUMMARY, finite, json_object, step_record
from lowmem_grpo.runs.views.chart import Chart
from lowmem_grpo.runs.views.charts import figures, is_drawn
from lowmem_grpo.runs.views.headline import PREFIX, Warned, count_alarms
from lowmem_grpo.runs.views.report import RunSnapshot, content, from_summary
from lowmem_grpo.runs.views.samples import LARGEST, Record, Reservoir, shown_sample
from lowmem_grpo.utils import count_text, size_text

LOG = "log.txt"  # a run's output, if it is kept
MOST_BYTES, LOG_BYTES = 16 * 1024 * 1024, 16 * 1024  # most bytes read of a JSON file, and of the end of a log
SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")  # terminal escape sequences
INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
PIECE = 4 * 1024 * 1024  # bytes read at a time; a longer line is not a run's record
LAST_STEP = 2**53  # largest exact integer in JavaScript
MOST_ROWS = 1600
MOST_NAMES = 500  # most metrics of a run that are kept
AVERAGED = ("time/", "episodes/", "reward_std")  # drawn stacked, or as a band around another line
SAMPLES, NEWEST = 600, 200  # samples kept of the whole run, and of its end
JUDGED = 20_000  # samples whose rewards are kept for the accuracy curve
LAST_BYTES = 64 * 1024 * 1024  # read from the end of completions.jsonl when a run is first followed
PAGE_BYTES, PAGE_POINTS = 800_000, 15_000  # bounds of a live page's content
NOW = ("running", "killed", "silent")  # states that a summary cannot know


def open_plain(path: Path) -> BinaryIO:
    """Open a file to read. OSError if the path's last part is a symlink or not a regular file, so that a page never
    shows files outside the run's folder and never blocks on a pipe."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(number, "rb")


def json_file(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none that can be read."""
    try:
        with open_plain(path) as file:
            return json_object(file.read(MOST_BYTES))
    except (OSError, ValueError):
        return {}


def end_of(path: Path, most: int) -> bytes:
    """Return at most the last `most` bytes of a file; empty if it cannot be read."""
    try:
        with open_plain(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most)
    except (OSError, ValueError):
        return b""


def log_tail(path: Path) -> str:
    """Return the last lines of a log; empty if there is none. A line that was overwritten, as by a progress bar, is
    returned in its last state, and terminal escape sequences are removed."""
    said = end_of(path, LOG_BYTES)
    text = said.decode("utf-8", errors="replace")
    whole = text.partition("\n")[2] if len(said) == LOG_BYTES and "\n" in text else text
    return "\n".join(map(last_state, whole.split("\n")))


def last_state(line: str) -> str:
    """Return a line as a terminal shows it after all carriage returns."""
    states = [state for state in SEQUENCE.sub("", line).split("\r") if state]
    return INVISIBLE.sub("", states[-1]) if states else ""


class JsonlTail:
    """An incremental reader of a JSON lines file. It starts again if the file was replaced or shortened, as by a
    resume. An unfinished line is left for the next read; a damaged or too long line is counted and skipped."""

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        """With `last_bytes`, the first read starts at most that far before the end of the file."""
        self.path, self.last_bytes = path, last_bytes
        self.file: tuple[int, int] | None = None  # device and inode of the file that was read
        self.offset, self.size, self.skipped, self.damaged = 0, 0, 0, 0  # bytes, and lines
        self.more = False  # whether the file goes on after the last piece
        self.is_new = False  # whether the last piece is the first of a file

    def read_records(self) -> list[Record]:
        """Read the next piece of the file, and return its records. If the file is gone, return none."""
        self.is_new, piece = False, b""
        with suppress(OSError), open_plain(self.path) as file:
            status = os.fstat(file.fileno())
            number, self.size = (status.st_dev, status.st_ino), status.st_size
            if number != self.file or self.size < self.offset:
                self.is_new, self.file, self.damaged = True, number, 0
                self.offset = self.skipped = max(0, self.size - self.last_bytes) if self.last_bytes else 0
            file.seek(self.offset)
            piece = file.read(PIECE)
        self.more = len(piece) == PIECE
        end = piece.rfind(b"\n") + 1
        self.offset += end or len(piece) * self.more  # a longer line counts once, by its last piece, as damaged
        lines = piece[:end].split(b"\n")[self.is_new and self.skipped > 0 :]
        return [record for line in lines if line.strip() for record in self.checked_records(line)]

    def checked_records(self, line: bytes) -> list[Record]:
        """Return a line's record in a list, with None for NaN and infinity. Count a damaged line, and return []."""
        with suppress(ValueError):
            record = step_record(line)
            if 0 <= record["step"] <= LAST_STEP:  # NaN and infinity are not
                return [finite(record) | {"step": int(record["step"])}]
        self.damaged += 1
        return []


class Series:
    """The metrics of a run, downsampled: two rows with the lowest and the highest values stand for `2 * width` older
    steps, so that no spike is lost. The newest steps have rows of their own."""

    def __init__(self) -> None:
        self.width, self.steps = 1, 0  # steps per row, and in all
        self.old: list[Record] = []
        self.new: list[Record] = []  # steps not yet merged
        self.names: dict[str, bool] = {}  # metrics seen so far, and whether each is kept
        self.warned: dict[str, Warned] = {}

    def add_record(self, record: Record) -> None:
        """Add a line of metrics.jsonl; a line of the newest step, such as an evaluation, is merged into its row."""
        row: Record = {"step": record["step"]}
        row |= {name: float(value) for name, value in record.items() if self.keeps(name, value)}
        self.warned = count_alarms([row], self.warned)
        if self.new and self.new[-1]["step"] == row["step"]:
            self.new[-1] |= row
            return
        self.new.append(row)
        self.steps += 1
        if len(self.new) > 2 * self.width:
            self.old += two_rows(self.new[: 2 * self.width])
            self.new = self.new[2 * self.width :]
        if len(self.old) >= MOST_ROWS:
            self.width *= 2
            self.old = [row for place in range(0, len(self.old), 4) for row in two_rows(self.old[place : place + 4])]

    def keeps(self, name: str, value: Any) -> bool:
        """Return whether a metric is shown anywhere and its value can be drawn."""
        if name not in self.names and len(self.names) < MOST_NAMES:
            self.names[name] = name != "step" and (is_drawn(name) or name.startswith(PREFIX))
        return self.names.get(name, False) and type(value) in (int, float) and abs(value) < LARGEST

    def rows(self) -> list[Record]:
        rows = [*self.old, *two_rows(self.new[:-1]), *self.new[-1:]]
        return sorted(rows, key=lambda row: row["step"])


def two_rows(rows: list[Record]) -> list[Record]:
    """Merge rows into two, at the first and the last step. Each metric has its lowest and its highest value in them, in
    the order in which they occurred, or its mean in both if it is one of `AVERAGED`."""
    if len(rows) <= 2:
        return rows
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    first, last = {"step": rows[0]["step"]}, {"step": rows[-1]["step"]}
    columns.pop("step")
    for name, values in columns.items():
        low, high = min(values), max(values)
        ends = (low, high) if values.index(low) <= values.index(high) else (high, low)
        first[name], last[name] = (fmean(values),) * 2 if name.startswith(AVERAGED) else ends
    return [first, last]


class RunFollower:
    """A thread-safe reader of the records that a run appends."""

    def __init__(self, path: Path, log: Path) -> None:
        """`log` has the run's output, and need not exist."""
        self.path, self.log, self.lock = path, log, Lock()
        self.metrics = JsonlTail(path / METRICS)
        self.completions = JsonlTail(path / COMPLETIONS, LAST_BYTES)
        self.series = Series()
        self.forget_samples()

    def forget_samples(self) -> None:
        self.samples, self.judged, self.logged = Reservoir(SAMPLES, NEWEST), Reservoir(JUDGED), 0

    def read_news(self) -> None:
        """Read at most one new piece of each file; afterwards `reading` says whether there is more."""
        with self.lock:
            steps, completions = self.metrics.read_records(), self.completions.read_records()
            if self.metrics.is_new:
                self.series = Series()
            for record in steps:
                self.series.add_record(record)
            if self.completions.is_new:
                self.forget_samples()
            for sample in map(shown_sample, completions):
                self.logged += 1
                self.samples.add_sample(sample)
                kept: Record = {key: sample[key] for key in ("step", "rewards", "replayed_from") if key in sample}
                self.judged.add_sample(kept)

    @property
    def reading(self) -> bool:
        return self.metrics.more or self.completions.more

    def version(self) -> tuple[Any, ...]:
        files = (self.path / METRICS, self.path / COMPLETIONS, self.path / SUMMARY, self.log)
        return *map(stamp, files), self.metrics.offset, self.completions.offset, self.reading

    def charts(self) -> list[Chart]:
        with self.lock:
            rows, judged = self.series.rows(), self.judged.samples()
        return from_summary(lambda summary: figures(rows, judged, summary), json_file(self.path / SUMMARY))

    def content(self, state: str = "") -> Record:
        """Return the page's content from the records read so far. A `state` in `NOW` overrides the summary's status."""
        with self.lock:
            snapshot = RunSnapshot(
                self.path.resolve().name, self.series.rows(), self.samples.samples(), self.judged.samples(),
                self.logged, dict(self.series.warned), self.note(), state if state in NOW else "",
                self.path / PICTURES)
        return from_summary(lambda summary: content(snapshot, summary, PAGE_BYTES, PAGE_POINTS),
                            json_file(self.path / SUMMARY))

    def note(self) -> str:
        """Return a text on what the page leaves out: unread, merged, skipped and damaged records."""
        said = []
        if self.reading:
            share = self.metrics.offset / max(1, self.metrics.size)
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


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a file's inode, size and time of change; None if there is none."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns)
