"""`JobQueue`: the jobs of a server, in its database."""

import json
import time
from pathlib import Path
from typing import Any

from lowmem_grpo.jobs.job import CANCELLED, LIVE, OVER, RUNNING, STOPPED, STOPPING, WAITING, Job, JobRequest
from lowmem_grpo.service.database import Database

TABLE = """CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, recipe TEXT NOT NULL, options TEXT NOT NULL, owner TEXT NOT NULL,
    priority INTEGER NOT NULL, time_limit REAL, share REAL NOT NULL, state TEXT NOT NULL, why TEXT NOT NULL,
    goes INTEGER NOT NULL, resume INTEGER NOT NULL, peak_bytes INTEGER, came REAL NOT NULL, began REAL, ended REAL,
    exit_code INTEGER)"""
NOT_YET = "waits for its turn"


class NoSuchJobError(LookupError):
    """There is no job of this number, or it is another user's."""


class JobQueue:
    """The jobs that wait, run or are over. Any thread may use it. Each change is on the disk when a method returns."""

    def __init__(self, database: Database, folder: Path) -> None:
        """`folder` gets one folder for each job, named by its number."""
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
        """Return the job of this number; with `owner`, only one of theirs. NoSuchJobError where there is none."""
        row = self.database.row("SELECT * FROM jobs WHERE id = ?", (number,))
        if row is None or (owner is not None and row["owner"] != owner):
            raise NoSuchJobError(f"there is no job {number}; `lowmem-grpo jobs` lists them")
        return Job.from_row(row)

    def all(self, owner: str | None = None) -> list[Job]:
        """Return every job, the newest first; with `owner`, only theirs."""
        return [job for job in self.where("id > 0 ORDER BY id DESC") if owner is None or job.owner == owner]

    def waiting(self) -> list[Job]:
        """Return those that wait, the next one first."""
        return self.where(f"state = '{WAITING}' ORDER BY priority DESC, id")

    def live(self) -> list[Job]:
        """Return those that a process works on, the oldest first."""
        return self.where(f"state IN {LIVE} ORDER BY id")

    def where(self, condition: str) -> list[Job]:
        return [Job.from_row(row) for row in self.database.rows(f"SELECT * FROM jobs WHERE {condition}")]

    def cancel(self, number: int, owner: str | None = None) -> Job:
        """Take a waiting job back, or ask a running one to stop. ValueError where it is over."""
        with self.database.lock:
            job = self.one(number, owner)
            if job.is_over:
                raise ValueError(f"job {number} is {job.state} already; there is nothing to cancel")
            if job.state != WAITING:
                return self.change(job, state=STOPPING, why="asked to stop: it finishes its step, and saves")
            # one that ran before has something to go on with
            return self.end(job, STOPPED if job.goes else CANCELLED, "taken back before it began", None)

    def resume(self, number: int, options: list[str], owner: str | None = None) -> Job:
        """Let a job that is over wait again, to go on from its last checkpoint with further options."""
        with self.database.lock:
            job = self.one(number, owner)
            if not job.is_over:
                raise ValueError(f"job {number} is {job.state}; only one that is {', '.join(OVER)} can be resumed")
            JobRequest(job.recipe, options)  # refuses what is no list of texts
            return self.change(job, state=WAITING, why=NOT_YET, resume=job.goes > 0, ended=None, exit_code=None,
                               peak_bytes=None, options=json.dumps(job.options + options))

    def begin(self, job: Job) -> Job:
        """Record that a process is about to be started for a job."""
        return self.change(job, state=RUNNING, why="", goes=job.goes + 1, began=time.time(), ended=None)

    def end(self, job: Job, state: str, why: str, exit_code: int | None) -> Job:
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
