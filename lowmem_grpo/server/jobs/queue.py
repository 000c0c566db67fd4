"""`JobQueue`: the jobs of a server, in its database; `JobRequest`: a job that a user submits."""

import json
import re
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lowmem_grpo.server.server_dir import Database

WAITING, RUNNING, STOPPING = "waiting", "running", "stopping"
DONE, FAILED, STOPPED, CANCELLED = "done", "failed", "stopped", "cancelled"
LIVE = (RUNNING, STOPPING)  # a process works on it
OVER = (DONE, FAILED, STOPPED, CANCELLED)
NAME = re.compile(r"[A-Za-z0-9_-]{1,100}(\.py)?")
OURS = ("output_dir", "resume", "card_share", "overwrite_output_dir")  # options that the queue sets itself
TIME = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")
MOST_PRIORITY = 1000
TABLE = """CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, recipe TEXT NOT NULL, options TEXT NOT NULL, owner TEXT NOT NULL,
    priority INTEGER NOT NULL, time_limit REAL, share REAL NOT NULL, state TEXT NOT NULL, why TEXT NOT NULL,
    goes INTEGER NOT NULL, resume INTEGER NOT NULL, peak_bytes INTEGER, came REAL NOT NULL, began REAL, ended REAL,
    exit_code INTEGER)"""
NOT_YET = "waits for its turn"


@dataclass(frozen=True)
class Job:
    """A row of the queue. Times are seconds since 1970; bytes are GPU memory."""

    id: int
    recipe: str
    options: list[str]  # `key=value`, as `lowmem-grpo run` takes them
    owner: str  # the user that submitted it
    priority: int = 0  # higher starts first; equal ones in the order of submission
    time_limit: float | None = None  # seconds of one start; the run then stops after its step, and saves
    share: float = 1.0  # the part of the GPU's memory that it may use; jobs run together if their shares fit
    state: str = WAITING
    why: str = ""  # why it waits, or how it ended
    goes: int = 0  # how many times it was started
    resume: bool = False  # whether the next start resumes from the last checkpoint
    peak_bytes: int | None = None  # planned peak memory; None if no plan was made
    came: float = 0.0
    began: float | None = None
    ended: float | None = None
    exit_code: int | None = None

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> "Job":
        return cls(**row | {"options": json.loads(row["options"]), "resume": bool(row["resume"])})

    @property
    def is_over(self) -> bool:
        return self.state in OVER


@dataclass(frozen=True)
class JobRequest:
    """A job that a user submits. ValueError names the invalid field."""

    recipe: str
    options: list[str] = field(default_factory=list)
    priority: int = 0
    time_limit: float | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, str) or not NAME.fullmatch(self.recipe):
            raise ValueError(f"recipe is {self.recipe!r}; give the name of a recipe (`lowmem-grpo run` lists them), or "
                             "of a file in the server's folder of recipes (NAME.py)")
        if not isinstance(self.options, list) or not all(isinstance(option, str) for option in self.options):
            raise ValueError(f"options is {self.options!r}; give a list of texts such as \"max_steps=100\"")
        for option in self.options:
            if (name := option.removeprefix("--").partition("=")[0].replace("-", "_")) in OURS:
                raise ValueError(f"options has {option!r}; the queue sets {name} itself: a job's run is in the "
                                 "server's folder, `lowmem-grpo resume` goes on with it, --share gives it a part of "
                                 "the card")
        if type(self.priority) is not int or abs(self.priority) > MOST_PRIORITY:
            raise ValueError(f"priority is {self.priority!r}; it must be a whole number from {-MOST_PRIORITY} to "
                             f"{MOST_PRIORITY}, of which higher ones start first")
        if self.time_limit is not None and not is_between(self.time_limit, sys.float_info.max):
            raise ValueError(f"time_limit is {self.time_limit!r}; it must be seconds above 0, or null for none")
        if not is_between(self.share, 1):
            raise ValueError(f"share is {self.share!r}; it must be a part of the card, above 0 and at most 1")

    @classmethod
    def from_json(cls, body: Any) -> "JobRequest":
        if not isinstance(body, dict) or "recipe" not in body:
            raise ValueError("send a JSON object with recipe, and if you like options, priority, time_limit and share")
        known = sorted(field.name for field in fields(cls))
        if unknown := sorted(set(body) - set(known)):
            raise ValueError(f"a job has no {', '.join(unknown)}; it has {', '.join(known)}")
        return cls(**body)


def is_between(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0 < value <= most


def seconds_of(text: str) -> float:
    """Return the seconds of "90", "90s", "45m", "2h" or "1h30m". Raises ValueError for other texts."""
    match = TIME.fullmatch(text.strip().lower())
    if match is None or not any(match.groups()):
        raise ValueError(f"the time {text!r} cannot be read; write 90s, 45m, 2h or 1h30m")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    if not (total := hours * 3600 + minutes * 60 + seconds):
        raise ValueError(f"the time {text!r} is nothing; give at least 1s, or leave it out")
    return float(total)


class NoSuchJobError(LookupError):
    """Raised for an unknown job number, or another user's job."""


class JobQueue:
    """All jobs of a server. Thread-safe; each change is on the disk when its method returns."""

    def __init__(self, database: Database, folder: Path) -> None:
        """`folder` holds one folder per job, named by the job's number."""
        database.add([TABLE])
        self.database, self.folder = database, folder

    def submit(self, asked: JobRequest, owner: str) -> Job:
        row = vars(asked) | {"options": json.dumps(asked.options), "owner": owner, "state": WAITING, "why": NOT_YET,
                             "goes": 0, "resume": 0, "came": time.time()}
        with self.database.write() as connection:
            made = connection.execute(f"INSERT INTO jobs ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})",
                                      tuple(row.values()))
        return self.one(int(made.lastrowid or 0))

    def one(self, number: int, owner: str | None = None) -> Job:
        """Return the job of this number; with `owner`, only one of that user's. NoSuchJobError if there is none."""
        row = self.database.row("SELECT * FROM jobs WHERE id = ?", (number,))
        if row is None or (owner is not None and row["owner"] != owner):
            raise NoSuchJobError(f"there is no job {number}; `lowmem-grpo jobs` lists them")
        return Job.from_row(row)

    def all(self, owner: str | None = None) -> list[Job]:
        """Return all jobs, the newest first; with `owner`, only that user's."""
        return [job for job in self.where("id > 0 ORDER BY id DESC") if owner is None or job.owner == owner]

    def waiting(self) -> list[Job]:
        """Return the waiting jobs, the next one first."""
        return self.where(f"state = '{WAITING}' ORDER BY priority DESC, id")

    def live(self) -> list[Job]:
        """Return the running and stopping jobs, the oldest first."""
        return self.where(f"state IN {LIVE} ORDER BY id")

    def where(self, condition: str) -> list[Job]:
        return [Job.from_row(row) for row in self.database.rows(f"SELECT * FROM jobs WHERE {condition}")]

    def cancel(self, number: int, owner: str | None = None) -> Job:
        """Take a waiting job out of the queue, or ask a running one to stop. ValueError if the job is over."""
        with self.database.lock:
            job = self.one(number, owner)
            if job.is_over:
                raise ValueError(f"job {number} is {job.state} already; there is nothing to cancel")
            if job.state != WAITING:
                return self.change(job, state=STOPPING, why="asked to stop: it finishes its step, and saves")
            # a job that ran before can be resumed
            return self.end_job(job, STOPPED if job.goes else CANCELLED, "taken back before it began", None)

    def resume(self, number: int, options: list[str]) -> Job:
        """Requeue a job that is over, to resume from its last checkpoint with more options. ValueError if it is not."""
        with self.database.lock:
            job = self.one(number)
            if not job.is_over:
                raise ValueError(f"job {number} is {job.state}; only one that is {', '.join(OVER)} can be resumed")
            JobRequest(job.recipe, options)  # checks the options
            return self.change(job, state=WAITING, why=NOT_YET, resume=job.goes > 0, ended=None, exit_code=None,
                               peak_bytes=None, options=json.dumps(job.options + options))

    def start_job(self, job: Job) -> Job:
        """Record that a job is about to be started."""
        return self.change(job, state=RUNNING, why="", goes=job.goes + 1, began=time.time(), ended=None)

    def end_job(self, job: Job, state: str, why: str, exit_code: int | None) -> Job:
        return self.change(job, state=state, why=why, exit_code=exit_code, ended=time.time())

    def change(self, job: Job, **values: Any) -> Job:
        columns = ", ".join(f"{name} = ?" for name in values)
        with self.database.write() as connection:
            connection.execute(f"UPDATE jobs SET {columns} WHERE id = ?", (*values.values(), job.id))
        return self.one(job.id)

    def folder_of(self, job: Job) -> Path:
        return self.folder / str(job.id)

    def run_of(self, job: Job) -> Path:
        return self.folder_of(job) / "run"
