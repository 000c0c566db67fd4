"""Threads in which environments and tools work while the engine decodes; async functions share one event loop.

Nothing can stop a thread. A job that passes its deadline is given up: its result is dropped when it comes, and another
thread takes the place of the one that hangs.
"""

import asyncio
import inspect
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from queue import Empty, SimpleQueue
from typing import Any

from lowmem_grpo.rewards.calling.background import BackgroundLoop, start_thread

PAUSE = 0.1  # seconds between looks for jobs that are late, and for Ctrl-C
TOGETHER = 0.005  # seconds by which jobs may follow each other and still be collected together


class WorkerJob:
    """One piece of work: calls of one environment, one after the other, each within `limit` seconds."""

    def __init__(self, key: int, work: Callable[["WorkerJob"], Any], limit: float, loop: BackgroundLoop) -> None:
        self.key, self.work, self.limit, self.loop = key, work, limit, loop
        self.result: Any = None
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.deadline = float("inf")  # for the call in progress, on the monotonic clock
        self.doing = ""  # the name of that call
        self.dropped = False

    def call(self, function: Callable[..., Any], values: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a function, or await an async one, as the job's next call; TimeoutError where it takes too long."""
        self.doing = str(getattr(function, "__qualname__", type(function).__name__))
        self.deadline = time.monotonic() + self.limit
        try:
            if not inspect.iscoroutinefunction(function):
                return function(*values, **named)
            future = self.loop.submit(lambda: function(*values, **named))
            try:
                return future.result(self.limit)
            except (FutureTimeout, asyncio.CancelledError):
                future.cancel()
                raise self.too_late() from None
        finally:
            self.deadline = float("inf")

    def too_late(self) -> TimeoutError:
        return TimeoutError(f"{self.doing} took more than {self.limit:g} s")

    def run(self) -> None:
        began = time.monotonic()
        try:
            self.result = self.work(self)
        except BaseException as error:  # noqa: BLE001  (whoever collects the job looks at it)
            self.error = error
        self.seconds = time.monotonic() - began


class Workers:
    """Daemon threads that do jobs. `collect` gives them back when they are done, or late."""

    def __init__(self, most: int = 64, loop: BackgroundLoop | None = None) -> None:
        """At most so many jobs are done at a time, beside those that hang. `loop` is one that others use too."""
        self.most = most
        self.waiting: SimpleQueue[WorkerJob | None] = SimpleQueue()
        self.done: SimpleQueue[WorkerJob] = SimpleQueue()
        self.running: set[WorkerJob] = set()  # given out and not collected
        self.threads = 0
        self.waited = 0.0  # seconds in which nothing else could be done
        self.loop = loop or BackgroundLoop("environments")

    def submit(self, key: int, work: Callable[[WorkerJob], Any], limit: float) -> WorkerJob:
        """Begin a job; it is given to `work`, which makes its calls through it."""
        job = WorkerJob(key, work, limit, self.loop)
        self.running.add(job)
        self.waiting.put(job)
        self.start_threads()
        return job

    def start_threads(self) -> None:
        """Begin as many threads as there are jobs, within the bound."""
        while self.threads < min(self.most, len(self.running)):
            self.threads += 1
            start_thread("environment", self.serve)

    def serve(self) -> None:
        """Do jobs until there are no more, or until one took so long that it was given up."""
        while (job := self.waiting.get()) is not None:
            job.run()
            if job.dropped:
                return  # another thread has taken this one's place
            self.done.put(job)

    def collect(self, wait: bool) -> list[WorkerJob]:
        """Return jobs that are done, or late with a TimeoutError, in no particular order; `wait` until there is one."""
        jobs: list[WorkerJob] = []
        began = time.monotonic()
        while not jobs and self.running:
            jobs = [job for job in self.finished(wait) if job in self.running] or self.late()
            if not wait:
                break
        self.waited += time.monotonic() - began if wait else 0.0
        self.running.difference_update(jobs)
        return jobs

    def finished(self, wait: bool) -> list[WorkerJob]:
        """Return the jobs that the threads have finished. With `wait`, wait for PAUSE seconds at most, and then for
        those that end just behind the first: to decode them together costs little more."""
        jobs: list[WorkerJob] = []
        try:
            while len(jobs) < len(self.running):
                jobs.append(self.done.get(wait, TOGETHER if jobs else PAUSE))
        except Empty:
            pass
        return jobs

    def late(self) -> list[WorkerJob]:
        """Give up the jobs whose call takes too long."""
        now = time.monotonic()
        late = [job for job in self.running if now > job.deadline]
        for job in late:
            job.dropped, job.error = True, job.too_late()
        self.threads -= len(late)  # their threads are lost
        self.running.difference_update(late)
        self.start_threads()
        return late

    def hurry(self, seconds: float) -> None:
        """Let every job that has begun, or waits, take so many seconds for a call at most."""
        for job in self.running:
            job.limit, job.deadline = min(job.limit, seconds), min(job.deadline, time.monotonic() + seconds)

    def close(self) -> None:
        """Let the threads end."""
        for _ in range(self.threads):
            self.waiting.put(None)
        self.threads = 0
