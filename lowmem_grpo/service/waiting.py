"""`Waiting`: what the owner of an engine is asked for and has not begun, in fair lines."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.service.call import Call
from lowmem_grpo.types import Turn

QUIET, PATIENCE = 0.05, 0.25  # of the last round's seconds: without a new call that end the wait for the next round,
# and of that wait at most
LEAST = 0.003  # seconds


class DeskClosedError(RuntimeError):
    """The desk was closed, so that nothing is sampled or run any more."""


@dataclass(eq=False)
class Asked:
    """A call that waits, or is in the engine."""

    call: Call
    seed: int
    future: "Future[Turn]"


@dataclass(eq=False)
class Job:
    """A function that is to run in the owner's thread."""

    function: Callable[[], Any]
    sleep: bool  # the engine frees its memory first
    future: "Future[Any]"


class Waiting:
    """One line for each flavour of calls, and one for jobs (None). The line that was served last comes last."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.lines: dict[tuple[object, ...] | None, deque[Any]] = {}  # none is empty; the next one to be served first
        self.closed = False

    def add(self, line: tuple[object, ...] | None, item: Asked | Job) -> None:
        """Let somebody wait. DeskClosedError after `close`."""
        with self.changed:
            if self.closed:
                raise DeskClosedError("the desk is closed: nothing is sampled or run any more; make a new Desk, or "
                                      "close it later")
            self.lines.setdefault(line, deque()).append(item)
            self.changed.notify_all()

    def next(self) -> Job | Call | None:
        """A job to run, or one of the calls of the flavour to serve, as soon as there is one; None after `close`."""
        with self.changed:
            self.changed.wait_for(lambda: self.lines or self.closed)
            if self.closed:
                return None
            line = next(iter(self.lines))
            if line is not None:
                call: Call = self.lines[line][0].call
                return call
            jobs = self.lines.pop(None)
            job: Job = jobs.popleft()
            if jobs:
                self.lines[None] = jobs  # behind the others
            return job

    def take(
        self, flavour: tuple[object, ...], most: int | None, wait: bool, first: bool, back: int = 0, took: float = 0.0,
    ) -> list[Asked]:
        """Calls of a flavour, at most so many. None where something else waits, but for the first ones of a
        conversation.

        With `wait` it blocks until there are some, or something else waits. `back` callers were served in a round that
        took so many seconds: it waits a moment longer for as many.
        """
        with self.changed:
            if wait:
                self.changed.wait_for(lambda: self.lines or self.closed)
                self.gather(flavour, back, took)
            if self.closed or (not first and any(line != flavour for line in self.lines)):
                return []
            line = self.lines.pop(flavour, deque())
            taken = [line.popleft() for _ in range(len(line) if most is None else min(most, len(line)))]
            if line:
                self.lines[flavour] = line  # behind the others
            return taken

    def gather(self, flavour: tuple[object, ...], back: int, took: float) -> None:
        """Wait a moment, until as many calls are there, no more come, or something else waits."""
        quiet, end = max(LEAST, QUIET * took), time.monotonic() + max(LEAST, PATIENCE * took)
        while not self.closed and list(self.lines) == [flavour] and 0 < len(self.lines[flavour]) < back:
            if time.monotonic() > end or not self.changed.wait(quiet):
                return

    def drain(self, flavour: tuple[object, ...]) -> list[Asked]:
        """All calls of a flavour, which wait no longer."""
        with self.changed:
            return list(self.lines.pop(flavour, ()))

    def close(self) -> list[Asked | Job]:
        """Let nobody in any more; returns who waited."""
        with self.changed:
            self.closed = True
            left = [item for line in self.lines.values() for item in line]
            self.lines.clear()
            self.changed.notify_all()
            return left
