"""Threads that run environments and tools while the engine decodes; async functions share one event loop. A thread
cannot be stopped, so a job that passes its deadline is abandoned: another thread replaces its thread, and its later
result is dropped."""

import inspect
import time
from collections.abc import Awaitable, Callable
from queue import Empty, SimpleQueue
from typing import Any

from lowmem_grpo.rewards.calling.background import BackgroundLoop, start_thread

PAUSE = 0.1  # seconds between checks for late jobs and Ctrl-C
TOGETHER = 0.005  # seconds within which jobs that finish one after the other are collected together


class LateError(TimeoutError):
    """A call of a job took longer than the job's `limit`."""


class WorkerJob:
    """One unit of work: consecutive calls of one environment, each within `limit` seconds."""

    def __init__(self, key: int, work: Callable[["WorkerJob"], Any], limit: float, loop: BackgroundLoop) -> None:
        self.key, self.work, self.limit, self.loop = key, work, limit, loop
        self.result: Any = None
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.deadline = float("inf")  # for the call in progress, on the monotonic clock
        self.doing = ""  # the name of that call
        self.dropped = False  # True once the job is abandoned as late

    def call(self, function: Callable[..., Any], values: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a function as the job's next call, and await its result if that is awaitable. LateError if the await
        takes more than `limit` seconds. `Workers.late` finds a synchronous call that takes too long."""
        self.doing = str(getattr(function, "__qualname__", type(function).__name__))
        self.deadline = time.monotonic() + self.limit
        try:
            result = function(*values, **named)
            return self.awaited(result) if inspect.isawaitable(result) else result
        finally:
            self.deadline = float("inf")

    def awaited(self, result: Awaitable[Any]) -> Any:
        future = self.loop.submit(lambda: result)
        try:
            return future.result(self.limit)
        except TimeoutError:
            if future.done():
                raise  # a TimeoutError of the function's own
            future.cancel()
            raise self.too_late() from None

    def too_late(self) -> "LateError":
        return LateError(f"{self.doing} took more than {self.limit:g} s")

    def run(self) -> None:
        began = time.monotonic()
        try:
            self.result = self.work(self)
        except BaseException as error:  # noqa: BLE001  (handled by the collector of the job)
            self.error = error
        self.seconds = time.monotonic() - began


class Workers:
    """Daemon threads that run jobs. `collect` returns the jobs that are done or late."""

    def __init__(self, most: int = 64, loop: BackgroundLoop | None = None) -> None:
        """Run at most `most` jobs at a time, not counting hung ones. `loop` is an event loop to share."""
        self.most = most
        self.waiting: SimpleQueue[WorkerJob | None] = SimpleQueue()
        self.done: SimpleQueue[WorkerJob] = SimpleQueue()
        self.running: set[WorkerJob] = set()  # submitted and not collected
        self.threads = 0
        self.waited = 0.0  # seconds spent in `collect` with `wait`
        self.loop = loop or BackgroundLoop("environments")

    def submit(self, key: int, work: Callable[[WorkerJob], Any], limit: float) -> WorkerJob:
        """Queue a job and return it. A thread calls `work(job)`, which makes its own calls through `job.call`."""
        job = WorkerJob(key, work, limit, self.loop)
        self.running.add(job)
        self.waiting.put(job)
        self.start_threads()
        return job

    def start_threads(self) -> None:
        while self.threads < min(self.most, len(self.running)):
            self.threads += 1
            start_thread("environment", self.serve)

    def serve(self) -> None:
        while (job := self.waiting.get()) is not None:
            job.run()
            if job.dropped:
                return  # another thread has replaced this one
            self.done.put(job)

    def collect(self, wait: bool) -> list[WorkerJob]:
        """Return the jobs that are done or late, in no fixed order; with `wait`, at least one if any is running."""
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
        """Return finished jobs. With `wait`, wait PAUSE seconds for the first, and TOGETHER for each further job."""
        jobs: list[WorkerJob] = []
        try:
            while len(jobs) < len(self.running):
                jobs.append(self.done.get(wait, TOGETHER if jobs else PAUSE))
        except Empty:
            pass
        return jobs

    def late(self) -> list[WorkerJob]:
        """Abandon and return the jobs whose current call has passed its deadline."""
        now = time.monotonic()
        late = [job for job in self.running if now > job.deadline]
        for job in late:
            job.dropped, job.error = True, job.too_late()
        self.threads -= len(late)  # their threads hang
        self.running.difference_update(late)
        self.start_threads()
        return late

    def hurry(self, seconds: float) -> None:
        """Limit the calls of all running and waiting jobs to `seconds`, counted from now for calls in progress."""
        for job in self.running:
            job.limit, job.deadline = min(job.limit, seconds), min(job.deadline, time.monotonic() + seconds)

    def close(self) -> None:
        """Tell the threads to end once the queued jobs are done."""
        for _ in range(self.threads):
            self.waiting.put(None)
        self.threads = 0
