"""A run that is followed: its files as far as they were read, which may be anything (a link, a pipe), and what a page
shows of them."""

import os
import re
import stat
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any, BinaryIO

from lowmem_grpo.runs.records import COMPLETIONS, METRICS, SUMMARY, finite, json_object, step_record
from lowmem_grpo.runs.views.chart import Chart
from lowmem_grpo.runs.views.charts import figures, is_drawn
from lowmem_grpo.runs.views.headline import PREFIX, Warned, count_alarms
from lowmem_grpo.runs.views.report import RunSnapshot, content, from_summary
from lowmem_grpo.runs.views.samples import LARGEST, Record, Reservoir, shown_sample
from lowmem_grpo.utils import count_text, size_text

LOG = "log.txt"  # a run's output, where somebody keeps it
MOST_BYTES, LOG_BYTES = 16 * 1024 * 1024, 16 * 1024  # read of a whole file, and of the end of a log
SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")  # colours and moves
INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
PIECE = 4 * 1024 * 1024  # bytes that are read at a time; a longer line is no record of a run
LAST_STEP = 2**53  # a page's script counts no further
MOST_ROWS = 1600
MOST_NAMES = 500  # metrics of a run that are kept
AVERAGED = ("time/", "episodes/", "reward_std")  # drawn on top of each other, or around another line
SAMPLES, NEWEST = 600, 200  # samples that are kept over the run, and of its end
JUDGED = 20_000  # samples whose rewards are kept for the curve of the accuracy
LAST_BYTES = 64 * 1024 * 1024  # read from the end of completions.jsonl when a run is first looked at
PAGE_BYTES, PAGE_POINTS = 800_000, 15_000  # in a page that follows a run
NOW = ("running", "killed", "silent")  # states that a summary does not know


def open_plain(path: Path) -> BinaryIO:
    """Return the open file. OSError where the last part of the path is a link, or where it is no regular file: a page
    shows what lies in the folder of a run, and does not wait for a pipe."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(number, "rb")


def json_file(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty where there is none that can be read."""
    try:
        with open_plain(path) as file:
            return json_object(file.read(MOST_BYTES))
    except (OSError, ValueError):
        return {}


def end_of(path: Path, most: int) -> bytes:
    """Return at most the last `most` bytes of a file; empty where there is none that can be read."""
    try:
        with open_plain(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most)
    except (OSError, ValueError):
        return b""


def log_tail(path: Path) -> str:
    """Return the last lines of a log; empty where there is none. Of a line that was written over, as by a progress bar,
    the last state is left, and what moves a terminal's cursor is left out."""
    said = end_of(path, LOG_BYTES)
    text = said.decode("utf-8", errors="replace")
    whole = text.partition("\n")[2] if len(said) == LOG_BYTES and "\n" in text else text
    return "\n".join(map(last_state, whole.split("\n")))


def last_state(line: str) -> str:
    """Return a line as a terminal has it in the end."""
    states = [state for state in SEQUENCE.sub("", line).split("\r") if state]
    return INVISIBLE.sub("", states[-1]) if states else ""


class JsonlTail:
    """Reads a JSON lines file from where it stopped. A line that is not whole yet is left for the next time, and one
    that is damaged or too long is counted and left out: a page goes on where a report would refuse."""

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        """With `last_bytes`, what lies further before the end at the beginning is not read."""
        self.path, self.last_bytes = path, last_bytes
        self.file: tuple[int, int] | None = None  # which file was read: device and inode
        self.place, self.size, self.skipped, self.damaged = 0, 0, 0, 0  # bytes, and lines
        self.inside = False  # in a line of which the rest is not read either
        self.more = False  # whether the last piece ended before the file did

    def is_new_file(self) -> bool:
        """Return whether the file is another one than before, as after a resume, so that everything is read anew."""
        try:
            status = self.path.lstat()
        except OSError:
            return False
        file, self.size = (status.st_dev, status.st_ino), status.st_size
        if file == self.file and self.size >= self.place:
            return False
        self.file, self.damaged = file, 0
        self.place = self.skipped = max(0, self.size - self.last_bytes) if self.last_bytes else 0
        self.inside = self.skipped > 0
        return True

    def read_records(self) -> list[Record]:
        """Return the records of the next piece, behind which `place` moves."""
        piece = self.read_piece()
        self.more = len(piece) == PIECE
        whole, end, _ = piece.rpartition(b"\n")
        if not end and not self.more:
            return []  # nothing new, or a line that is still being written
        if not end:
            self.damaged += not self.inside
            self.inside, self.place = True, self.place + len(piece)
            return []
        lines = whole.split(b"\n")[self.inside :]
        self.inside, self.place = False, self.place + len(whole) + 1
        return [record for line in lines for record in self.checked_records(line)]

    def read_piece(self) -> bytes:
        """Return the next bytes; none where the file is gone, or another one by now."""
        try:
            with open_plain(self.path) as file:
                status = os.fstat(file.fileno())
                file.seek(self.place)
                return file.read(PIECE) if (status.st_dev, status.st_ino) == self.file else b""
        except OSError:
            return b""

    def checked_records(self, line: bytes) -> list[Record]:
        """Return a line's record, finite, its step a whole number; nothing if it is empty, or damaged and counted."""
        try:
            record = step_record(line) if line.strip() else None
        except ValueError:
            record = {"step": -1}
        if record is not None and not 0 <= record["step"] <= LAST_STEP:  # NaN and infinity neither
            self.damaged += 1
            return []
        return [] if record is None else [finite(record) | {"step": int(record["step"])}]


class Series:
    """The rows of a run. As long as there are few steps, each has its own; later two rows stand for the steps of a
    stretch, so that no spike is lost. The newest steps are always there as they are."""

    def __init__(self) -> None:
        self.width, self.steps = 1, 0  # steps that a row stands for, and all
        self.old: list[Record] = []
        self.new: list[Record] = []  # steps of the stretch that is not full yet
        self.names: dict[str, bool] = {}  # that came so far, and whether they are kept
        self.warned: dict[str, Warned] = {}

    def add_record(self, record: Record) -> None:
        """Take a line of metrics.jsonl; one with the newest step, such as an evaluation, joins it."""
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
        """Return whether a metric is shown anywhere, and its value a number that can be drawn."""
        if name not in self.names and len(self.names) < MOST_NAMES:
            self.names[name] = name != "step" and (is_drawn(name) or name.startswith(PREFIX))
        return self.names.get(name, False) and type(value) in (int, float) and abs(value) < LARGEST

    def rows(self) -> list[Record]:
        """Return the rows, in the order of the steps; the last is the newest step."""
        rows = [*self.old, *two_rows(self.new[:-1]), *self.new[-1:]]
        return sorted(rows, key=lambda row: row["step"])


def two_rows(rows: list[Record]) -> list[Record]:
    """Return a row of the first step and one of the last in place of some rows. Each metric has its lowest and its
    highest value in them, in the order in which these came, or its mean in both where means are drawn."""
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
    """Reads what a run appends. Several threads may ask it at a time."""

    def __init__(self, path: Path, log: Path | None = None) -> None:
        self.path, self.log_path, self.lock = path, log, Lock()
        self.metrics = JsonlTail(path / METRICS)
        self.completions = JsonlTail(path / COMPLETIONS, LAST_BYTES)
        self.series = Series()
        self.forget_samples()

    def forget_samples(self) -> None:
        self.samples, self.judged, self.logged = Reservoir(SAMPLES, NEWEST), Reservoir(JUDGED), 0

    def read_news(self) -> None:
        """Read what is new, of each file at most one piece. `reading` says whether there is more."""
        with self.lock:
            if self.metrics.is_new_file():
                self.series = Series()
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
        with self.lock:
            rows, judged = self.series.rows(), self.judged.samples()
        return from_summary(lambda summary: figures(rows, judged, summary), json_file(self.path / SUMMARY))

    def content(self, state: str = "") -> Record:
        """Return what the page shows, as far as it was read. `state` is known besides: running, killed, silent."""
        with self.lock:
            snapshot = RunSnapshot(
                self.path.resolve().name, self.series.rows(), self.samples.samples(), self.judged.samples(),
                self.logged, dict(self.series.warned), self.note(), state if state in NOW else "")
        return from_summary(lambda summary: content(snapshot, summary, PAGE_BYTES, PAGE_POINTS),
                            json_file(self.path / SUMMARY))

    def note(self) -> str:
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


def stamp(path: Path | None) -> tuple[int, int, int] | None:
    """Return which file, how long, how new; None without one."""
    try:
        status = path.lstat() if path else None
    except OSError:
        return None
    return status and (status.st_ino, status.st_size, status.st_mtime_ns)
