"""`Waiting`: what the owner of an engine is asked for and has not begun, in fair lines."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.service.call import Call
from lowmem_grpo.types import Turn

Round = tuple[int, float]  # its calls, and its seconds
QUIET, PATIENCE = 0.05, 0.25  # fractions of the last round's seconds: longest silence, longest wait for the next round
NO_ROUND: Round = (0, 0.0)
LEAST = 0.003  # seconds
FIRST = 0.1  # seconds without a new call that end the wait for the first round of a conversation, at most


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
        self, flavour: tuple[object, ...], most: int | None, wait: bool, first: bool, last: Round = NO_ROUND,
        widest: Round = NO_ROUND,
    ) -> list[Asked]:
        """Calls of a flavour, at most so many. None where something else waits, but for the first ones of a
        conversation.

        With `wait` it blocks until there are some, or something else waits. Then it waits a moment longer: for those
        who were served in the `last` round, or, where they did not come back at once and the `widest` round had
        several, until no more come.
        """
        with self.changed:
            if wait:
                back, took = last[0] + len(self.lines.get(flavour, ())), last[1]
                began, soon = time.monotonic(), max(LEAST, PATIENCE * took)
                self.changed.wait_for(lambda: self.lines or self.closed)
                if first or time.monotonic() - began > soon:
                    self.gather(flavour, math.inf if widest[0] > 1 else 0, widest[1], FIRST)
                else:
                    self.gather(flavour, back, took, math.inf)
            if self.closed or (not first and any(line != flavour for line in self.lines)):
                return []
            line = self.lines.pop(flavour, deque())
            taken = [line.popleft() for _ in range(len(line) if most is None else min(most, len(line)))]
            if line:
                self.lines[flavour] = line  # behind the others
            return taken

    def gather(self, flavour: tuple[object, ...], back: float, took: float, most: float) -> None:
        """Wait a moment, until as many calls are there and the next one does not follow at once, none came for at most
        so many seconds, or something else waits. A call that comes alone is not held up."""
        quiet, end = min(max(LEAST, QUIET * took), most), time.monotonic() + max(LEAST, PATIENCE * took)
        while not self.closed and list(self.lines) == [flavour] and time.monotonic() < end:
            count = len(self.lines[flavour])
            if 1 == count >= back or not self.changed.wait(quiet if count < back else LEAST):
                return

    def drain(self, flavour: tuple[object, ...]) -> list[Asked]:
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
