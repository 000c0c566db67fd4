"""`JobQueue`: the jobs of a server, in its database; `JobRequest`: a job that a user submits."""

import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from lowmem_grpo.server.requests import shown
from lowmem_grpo.server.server_dir import Database
from lowmem_grpo.utils import NOT_TEXT, Rule, check_ranges, number

WAITING, RUNNING, STOPPING = "waiting", "running", "stopping"
DONE, FAILED, STOPPED, CANCELLED = "done", "failed", "stopped", "cancelled"
LIVE = (RUNNING, STOPPING)  # states of jobs with a process
OVER = (DONE, FAILED, STOPPED, CANCELLED)
NAME = re.compile(r"[A-Za-z0-9_-]{1,100}(\.py)?")
OURS = ("output_dir", "resume", "card_share", "overwrite_output_dir")  # options that the queue sets itself
MOST_BYTES = 64 * 1024  # a job's options: Linux takes no word of 128 KiB in a command
NO_COMMAND = re.compile("[\0\ud800-\udfff\ufffd]")  # U+FFFD stands for a surrogate of an older version
MOST_WAITING = 1000  # jobs of a user
MOST_OVER = 1000  # jobs of a user that are over and known: those that ended last
LONGEST = 1e9  # the longest time limit, in seconds
TABLE = """CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, recipe TEXT NOT NULL, options TEXT NOT NULL, owner TEXT NOT NULL,
    priority INTEGER NOT NULL, time_limit REAL, share REAL NOT NULL, state TEXT NOT NULL, why TEXT NOT NULL,
    goes INTEGER NOT NULL, resume INTEGER NOT NULL, peak_bytes INTEGER, came REAL NOT NULL, began REAL, ended REAL,
    exit_code INTEGER)"""
NOT_YET = "waits for its turn"


@dataclass(frozen=True)
class JobRequest:
    recipe: str
    options: list[str] = field(default_factory=list)  # `key=value`, as `lowmem-grpo run` takes them
    priority: int = 0  # of a user's jobs, higher ones start first; equal ones in the order of submission
    time_limit: float | None = None  # seconds for each start; the run then stops after its step, and saves
    share: float = 1.0  # the part of the GPU's memory that it may use; jobs run together if their shares fit

    RANGES: ClassVar[dict[str, Rule]] = {
        "recipe": ("the name of a recipe (`lowmem-grpo run` lists them), or of a file in the server's folder of "
                   "recipes (NAME.py)", lambda value: isinstance(value, str) and bool(NAME.fullmatch(value))),
        "options": ("a list of texts such as \"max_steps=100\"", lambda value: isinstance(value, list)
                    and all(isinstance(option, str) for option in value)),
        "priority": ("a whole number from -1000 to 1000, of which higher ones start first",
                     lambda value: type(value) is int and abs(value) <= 1000),
        "time_limit": number("seconds above 0", lambda value: 0 < value <= LONGEST),
        "share": number("a part of the card, above 0 and at most 1", lambda value: 0 < value <= 1),
    }

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "JobRequest":
        """Return a request with the fields of a JSON object. ValueError names an invalid field."""
        names = [field.name for field in fields(cls)]
        if "recipe" not in body or not body.keys() <= {*names}:
            raise ValueError(f"a job has recipe, and if you like {', '.join(names[1:])}; sent was {', '.join(body)}")
        check_ranges(asked := cls(**body))
        if (size := sum(len(option.encode("utf-8", "replace")) + 1 for option in asked.options)) > MOST_BYTES:
            raise ValueError(f"options have {size:,} bytes; they may have {MOST_BYTES:,}: put what is long into a "
                             "file, and name the file")
        for option in asked.options:
            if wrong := NO_COMMAND.search(option):
                raise ValueError(f"options has {shown(option)}; a command cannot have its character {wrong[0]!r}")
            if (name := option.removeprefix("--").partition("=")[0].replace("-", "_")) in OURS:
                raise ValueError(f"options has {option!r}; the queue sets {name} itself: a job's run is in the "
                                 "server's folder, `lowmem-grpo resume` goes on with it, --share gives it a part of "
                                 "the card")
        return asked


@dataclass(frozen=True)
class Job(JobRequest):
    """A job in the queue. Times are seconds since 1970."""

    id: int = 0
    owner: str = ""  # the user that submitted it
    state: str = WAITING
    why: str = ""  # why it waits, or how it ended
    goes: int = 0  # how many times it was started
    resume: bool = False  # whether the next start resumes from the last checkpoint
    peak_bytes: int | None = None  # planned peak memory; None if no plan was made
    came: float = 0.0
    began: float | None = None
    ended: float | None = None
    exit_code: int | None = None


class JobQueue:
    """All jobs of a server. Thread-safe; each change is on the disk when the method returns."""

    def __init__(self, database: Database, folder: Path) -> None:
        """`folder` contains a folder for each job, named by the job's number."""
        database.add([TABLE])
        self.database, self.folder = database, folder

    def submit(self, asked: JobRequest, owner: str) -> Job:
        """Put a job into the queue. ValueError if too many of its owner's wait."""
        row = vars(asked) | {"options": json.dumps(asked.options), "owner": owner, "state": WAITING, "why": NOT_YET,
                             "goes": 0, "resume": 0, "came": time.time()}
        with self.database.lock:  # two requests at once are not both the last that may wait
            self.check_waiting(owner)
            with self.database.write() as connection:
                made = connection.execute(f"INSERT INTO jobs ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})",
                                          tuple(row.values()))
        return self.one(int(made.lastrowid or 0))

    def check_waiting(self, owner: str) -> None:
        if sum(job.owner == owner for job in self.waiting()) >= MOST_WAITING:
            raise ValueError(f"{MOST_WAITING} of your jobs wait already; submit more when some of them have begun")

    def one(self, number: int, owner: str | None = None) -> Job:
        """Return a job by its number. LookupError if there is none, or if it is not `owner`'s (None: any user's)."""
        for job in self.where("id = ?", str(number)):  # as a text, since SQLite refuses very large numbers
            if owner in (None, job.owner):
                return job
        raise LookupError(f"there is no job {number}; `lowmem-grpo jobs` lists them")

    def all(self, owner: str | None = None) -> list[Job]:
        """Return all jobs, the newest first; with `owner`, only that user's."""
        return self.where("owner = ? OR ? IS NULL ORDER BY id DESC", owner, owner)

    def waiting(self) -> list[Job]:
        """Return the waiting jobs in the order in which they start. Users take turns: first comes the user whose last
        start is the longest ago, with one job."""
        began = {row["owner"]: row["last"] or 0.0
                 for row in self.database.rows("SELECT owner, MAX(began) AS last FROM jobs GROUP BY owner")}
        turns, before = list[tuple[int, float, int, Job]](), Counter[str]()
        for job in self.where("state = ? ORDER BY priority DESC, id", WAITING):
            turns.append((before[job.owner], began[job.owner], len(turns), job))
            before[job.owner] += 1
        return [job for *_, job in sorted(turns)]

    def live(self) -> list[Job]:
        return self.where("state IN (?, ?) ORDER BY id", *LIVE)

    def where(self, condition: str, *values: Any) -> list[Job]:
        return [Job(**row | {"options": [NOT_TEXT[True].sub("\ufffd", option) for option in json.loads(row["options"])],
                             "resume": bool(row["resume"])})
                for row in self.database.rows(f"SELECT * FROM jobs WHERE {condition}", values)]

    def cancel(self, number: int, owner: str | None = None) -> Job:
        """Take a waiting job out of the queue, or ask a running one to stop. ValueError if the job is over."""
        with self.database.lock:
            job = self.one(number, owner)
            if job.state in OVER:
                raise ValueError(f"job {number} is {job.state} already; there is nothing to cancel")
            if job.state != WAITING:
                return self.change(job, state=STOPPING, why="asked to stop: it finishes its step, and saves")
            # a job that ran before can be resumed
            return self.end_job(job, STOPPED if job.goes else CANCELLED, "taken back before it began")

    def resume(self, number: int, options: list[str]) -> Job:
        """Requeue a job to resume from its last checkpoint with more options. ValueError if the job is not over, or
        if too many of its owner's wait."""
        with self.database.lock:
            job = self.one(number)
            if job.state not in OVER:
                raise ValueError(f"job {number} is {job.state}; only one that is {', '.join(OVER)} can be resumed")
            self.check_waiting(job.owner)
            return self.change(job, state=WAITING, why=NOT_YET, resume=job.goes > 0, ended=None, exit_code=None,
                               peak_bytes=None, options=json.dumps(job.options + options))

    def start_job(self, job: Job) -> Job:
        """Mark a job as running."""
        return self.change(job, state=RUNNING, why="", goes=job.goes + 1, began=time.time(), ended=None)

    def end_job(self, job: Job, state: str, why: str, exit_code: int | None = None) -> Job:
        """Record the end of a job, and forget its owner's that ended first. Their folders stay."""
        ended = self.change(job, state=state, why=why, exit_code=exit_code, ended=time.time())
        self.database.change(
            f"DELETE FROM jobs WHERE id IN (SELECT id FROM jobs WHERE owner = ? AND state IN "
            f"({', '.join('?' * len(OVER))}) ORDER BY ended DESC, id DESC LIMIT -1 OFFSET ?)",
            (job.owner, *OVER, MOST_OVER))
        return ended

    def change(self, job: Job, **values: Any) -> Job:
        """Update a job unless its state in the database has changed since `job` was read. Return the current job."""
        columns = ", ".join(f"{name} = ?" for name in values)
        self.database.change(f"UPDATE jobs SET {columns} WHERE id = ? AND state = ?",
                             (*values.values(), job.id, job.state))
        return self.one(job.id)

    def folder_of(self, job: Job) -> Path:
        return self.folder / str(job.id)
