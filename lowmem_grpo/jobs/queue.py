"""`JobQueue`: the jobs of a server, in its database."""

import json
import time
from pathlib import Path
from typing import Any

from lowmem_grpo.jobs.job import CANCELLED, LIVE, OVER, RUNNING, STOPPED, STOPPING, WAITING, Asked, Job
from lowmem_grpo.service.database import Database

TABLE = """CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, recipe TEXT NOT NULL, options TEXT NOT NULL, owner TEXT NOT NULL,
    priority INTEGER NOT NULL, time_limit REAL, share REAL NOT NULL, state TEXT NOT NULL, why TEXT NOT NULL,
    goes INTEGER NOT NULL, resume INTEGER NOT NULL, peak_bytes INTEGER, came REAL NOT NULL, began REAL, ended REAL,
    exit_code INTEGER)"""
NOT_YET = "waits for its turn"
TAKEN_BACK = "taken back before it began"
ASKED_TO_STOP = "asked to stop: it finishes its step, and saves"


class NoSuchJobError(LookupError):
    """There is no job of this number, or it is another user's."""


class JobQueue:
    """What waits, runs and is over. Any thread may use it; every change is on the disk when a method returns."""

    def __init__(self, database: Database, folder: Path) -> None:
        """`folder` gets one folder for each job, named by its number."""
        database.add([TABLE])
        self.database, self.folder = database, folder

    def submit(self, asked: Asked, owner: str) -> Job:
        """A new job at the end of the queue."""
        with self.database.write() as connection:
            made = connection.execute(
                "INSERT INTO jobs (recipe, options, owner, priority, time_limit, share, state, why, goes, resume, came)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, 0, ?)",
                (asked.recipe, json.dumps(asked.options), owner, asked.priority, asked.time_limit, asked.share, WAITING,
                 NOT_YET, time.time()))
        return self.one(int(made.lastrowid or 0))

    def one(self, number: int, owner: str | None = None) -> Job:
        """The job of this number; with `owner`, only one of theirs. NoSuchJobError where there is none."""
        row = self.database.row("SELECT * FROM jobs WHERE id = ?", (number,))
        if row is None or (owner is not None and row["owner"] != owner):
            raise NoSuchJobError(f"there is no job {number}; `lowmem-grpo jobs` lists them")
        return Job.of(row)

    def all(self, owner: str | None = None) -> list[Job]:
        """Every job, the newest first; with `owner`, only theirs."""
        found = map(Job.of, self.database.rows("SELECT * FROM jobs ORDER BY id DESC"))
        return [job for job in found if owner is None or job.owner == owner]

    def waiting(self) -> list[Job]:
        """Those that wait, the next one first."""
        rows = self.database.rows("SELECT * FROM jobs WHERE state = ? ORDER BY priority DESC, id", (WAITING,))
        return list(map(Job.of, rows))

    def live(self) -> list[Job]:
        """Those that a process works on, the oldest first."""
        rows = self.database.rows(f"SELECT * FROM jobs WHERE state IN {LIVE} ORDER BY id")
        return list(map(Job.of, rows))

    def cancel(self, number: int, owner: str | None = None) -> Job:
        """Take a waiting job back, or ask a running one to stop. ValueError where it is over."""
        with self.database.lock:
            job = self.one(number, owner)
            if job.is_over:
                raise ValueError(f"job {number} is {job.state} already; there is nothing to cancel")
            if job.state == WAITING:
                never = {"state": CANCELLED, "why": TAKEN_BACK}
                # one that ran before has something to go on with
                return self.change(job, ended=time.time(), **(never | {"state": STOPPED} if job.goes else never))
            return self.change(job, state=STOPPING, why=ASKED_TO_STOP)

    def resume(self, number: int, options: list[str], owner: str | None = None) -> Job:
        """Let a job that is over wait again, to go on from its last checkpoint with further options."""
        with self.database.lock:
            job = self.one(number, owner)
            if not job.is_over:
                raise ValueError(f"job {number} is {job.state}; only one that is {', '.join(OVER)} can be resumed")
            Asked(job.recipe, options)  # refuses what is no list of texts
            return self.change(job, state=WAITING, why=NOT_YET, resume=job.goes > 0, ended=None, exit_code=None,
                               peak_bytes=None, options=json.dumps(job.options + options))

    def began(self, job: Job) -> Job:
        """A process is about to be started for it."""
        return self.change(job, state=RUNNING, why="", goes=job.goes + 1, began=time.time(), ended=None)

    def again(self, job: Job, why: str) -> Job:
        """Back among those that wait, to go on from its last checkpoint."""
        return self.change(job, state=WAITING, why=why, resume=True)

    def end(self, job: Job, state: str, why: str, exit_code: int | None) -> Job:
        return self.change(job, state=state, why=why, exit_code=exit_code, ended=time.time())

    def explain(self, job: Job, why: str) -> None:
        """Say why a job waits; nothing is written where it is known."""
        if job.why != why:
            self.change(job, why=why)

    def change(self, job: Job, **values: Any) -> Job:
        """Write columns of a job."""
        columns = ", ".join(f"{name} = ?" for name in values)
        with self.database.write() as connection:
            connection.execute(f"UPDATE jobs SET {columns} WHERE id = ?", (*values.values(), job.id))
        return self.one(job.id)

    def folder_of(self, job: Job) -> Path:
        """Where its log and its run are."""
        return self.folder / str(job.id)
