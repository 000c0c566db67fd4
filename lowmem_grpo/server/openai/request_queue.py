"""`RequestQueue`: what the owner of an engine is asked for, in fair lines; `EngineSession`: the calls in the engine."""

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Engine, Request
from lowmem_grpo.types import Rollout, Turn

LIVE = "live"  # the adapter in the model, as it is when the completion is drawn
Round = tuple[int, float]  # its calls, and its seconds
QUIET, PATIENCE = 0.05, 0.25  # fractions of the last round's seconds: longest silence, longest wait for the next round
NO_ROUND: Round = (0, 0.0)
LEAST = 0.003  # seconds
FIRST = 0.1  # seconds without a new call that end the wait for the first round of a conversation, at most
logger = logging.getLogger(__name__)
MOST = 4096  # conversations that are remembered; an engine keeps fewer


@dataclass(eq=False)
class Call:
    """One completion that is asked for, at most once. Calls of one `batch_key` are decoded together."""

    ids: list[int]  # (P,) of the prompt
    params: SamplingParams  # n is 1; max_tokens and seed are its own
    adapter: Path | str | None = LIVE  # the folder of a saved adapter, LIVE, or None for the base model
    key: int | None = None  # the conversation's: what was computed for its last call need not be computed again
    version: int | None = None  # the policy's, where `adapter` is a saved one
    future: "Future[Turn]" = field(default_factory=Future)
    seed: int = 0  # for its random numbers; the worker sets it

    @cached_property
    def batch_key(self) -> tuple[object, ...]:
        """The settings that all calls of one conversation share."""
        params = self.params
        return (self.adapter, params.temperature, params.top_p, params.top_k, params.min_p,
                tuple(params.stop_strings), tuple(params.stop_token_ids or ()), params.ignore_eos)


class WorkerClosedError(RuntimeError):
    """The worker was closed, so that nothing is sampled or run any more."""


@dataclass(eq=False)
class WorkerTask:
    """A function that is to run in the owner's thread."""

    function: Callable[[], Any]
    sleep: bool  # the engine frees its memory first
    future: "Future[Any]" = field(default_factory=Future)


class RequestQueue:
    """One line for each `batch_key` of calls, and one for jobs (None). The line that was served last comes last."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.lines: dict[tuple[object, ...] | None, deque[Any]] = {}  # none is empty; the next one to be served first
        self.closed = False

    def add(self, item: Call | WorkerTask) -> None:
        """Let somebody wait; after `close`, their future has WorkerClosedError."""
        with self.changed:
            if self.closed:
                item.future.set_exception(WorkerClosedError("the worker is closed: nothing is sampled or run any more; "
                                                            "make a new EngineWorker, or close it later"))
                return
            self.lines.setdefault(item.batch_key if isinstance(item, Call) else None, deque()).append(item)
            self.changed.notify_all()

    def next(self) -> WorkerTask | Call | None:
        """A job to run, or a call of the `batch_key` to serve, as soon as there is one; None after `close`."""
        with self.changed:
            self.changed.wait_for(lambda: self.lines or self.closed)
            if self.closed:
                return None
            line = next(iter(self.lines))
            if line is not None:
                call: Call = self.lines[line][0]
                return call
            jobs = self.lines.pop(None)
            job: WorkerTask = jobs.popleft()
            if jobs:
                self.lines[None] = jobs  # behind the others
            return job

    def take_calls(
        self, batch_key: tuple[object, ...], most: int | None, wait: bool, first: bool, last: Round, widest: Round,
    ) -> list[Call]:
        """Calls of a `batch_key`, at most so many. None where something else waits, but for the first ones of a
        conversation.

        With `wait` it blocks until there are some, or something else waits. Then it waits a moment longer: for those
        who were served in the `last` round, or, where they did not come back at once and the `widest` round had
        several, until no more come."""
        with self.changed:
            if wait:
                back, took = last[0] + len(self.lines.get(batch_key, ())), last[1]
                began, soon = time.monotonic(), max(LEAST, PATIENCE * took)
                self.changed.wait_for(lambda: self.lines or self.closed)
                if first or time.monotonic() - began > soon:
                    self.gather(batch_key, math.inf if widest[0] > 1 else 0, widest[1], FIRST)
                else:
                    self.gather(batch_key, back, took, math.inf)
            if self.closed or (not first and any(line != batch_key for line in self.lines)):
                return []
            line = self.lines.pop(batch_key, deque())
            taken = [line.popleft() for _ in range(len(line) if most is None else min(most, len(line)))]
            if line:
                self.lines[batch_key] = line  # behind the others
            return taken

    def gather(self, batch_key: tuple[object, ...], back: float, took: float, most: float) -> None:
        """Wait a moment: until so many calls are there and no more follow, none came for `most` seconds, or something
        else waits. A call alone is not held up."""
        quiet, end = min(max(LEAST, QUIET * took), most), time.monotonic() + max(LEAST, PATIENCE * took)
        while not self.closed and list(self.lines) == [batch_key] and time.monotonic() < end:
            count = len(self.lines[batch_key])
            if 1 == count >= back or not self.changed.wait(quiet if count < back else LEAST):
                return

    def drain(self, batch_key: tuple[object, ...]) -> list[Call]:
        with self.changed:
            return list(self.lines.pop(batch_key, ()))

    def close(self) -> list[Call | WorkerTask]:
        """Let nobody in any more; returns who waited."""
        with self.changed:
            self.closed = True
            left = [item for line in self.lines.values() for item in line]
            self.lines.clear()
            self.changed.notify_all()
            return left


class Keys:
    """Numbers of conversations and sets of weights, never one for two, so that an engine confuses no caches."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.known: dict[tuple[object, ...], int] = {}  # by adapter, the caller's key, session; the latest used last

    def new(self) -> int:
        return next(self.numbers)

    def number_of(self, call: Call, engine_session: int) -> int:
        """Return the number of a call's conversation; one in each session for a saved adapter, which may change."""
        if call.key is None:
            return self.new()
        name = (call.adapter, call.key, None if call.adapter in (LIVE, None) else engine_session)
        self.known[name] = number = self.known.pop(name) if name in self.known else self.new()
        if len(self.known) > MOST:
            del self.known[next(iter(self.known))]
        return number


class EngineSession:
    """A `Conversation` of an engine. It ends where anything else waits, once the calls in the engine are finished."""

    goes_on = True  # in a later session of the engine

    def __init__(
        self, waiting: RequestQueue, batch_key: tuple[object, ...], keys: Keys, before: Round = NO_ROUND
    ) -> None:
        """`before` is a round of an earlier session, its calls and its seconds: as many may come again."""
        self.waiting, self.batch_key, self.keys, self.number = waiting, batch_key, keys, keys.new()
        self.before, self.widest = before, NO_ROUND  # `widest` is the round of this session with the most calls
        self.open: dict[int, Call] = {}
        self.engine: Engine | None = None
        self.begun = False
        self.back, self.since = 0, time.monotonic()  # callers that were served since the engine took calls, and when

    def meet(self, engine: Engine) -> None:
        self.engine = engine

    def next_requests(self, busy: bool) -> list[Request]:
        """See `Conversation`. Calls that were cancelled meanwhile are left out."""
        self.widest = max(self.widest, self.last)
        while taken := self.waiting.take_calls(self.batch_key, self.room, not busy, not self.begun, *self.expected):
            self.begun, self.back, self.since = True, 0, time.monotonic()
            if requests := [self.enter(call) for call in taken if not call.future.cancelled()]:
                return requests
        return []

    def add_rollout(self, key: int, rollout: Rollout) -> None:
        """The turn of a call is drawn. One that was cancelled is dropped."""
        call = self.open.pop(key)
        self.back += 1
        if call.future.set_running_or_notify_cancel():
            call.future.set_result(turn_of(call, rollout))

    def fail(self, error: BaseException) -> None:
        """The engine failed: its calls are told; where there are none, those that wait for the same."""
        left = list(self.open.values()) or self.waiting.drain(self.batch_key)
        self.open.clear()
        logger.warning("%d calls failed with the engine: %s: %s", len(left), type(error).__name__, error)
        for call in left:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(error)

    def check_done(self) -> None:
        """RuntimeError where an engine ended the conversation without all of its turns."""
        if self.open:
            name = getattr(self.engine, "name", self.engine)
            raise RuntimeError(f"the engine {name} did not answer {len(self.open)} of its calls")

    @property
    def room(self) -> int | None:
        """Calls that the engine can decode now beside those that it has; None is no bound."""
        slots = getattr(self.engine, "slots", None)  # a caller's own engine may not say
        return None if slots is None else max(0, slots - len(self.open))

    @property
    def last(self) -> Round:
        """The callers that were served since the engine took calls, and the seconds since then."""
        return self.back, time.monotonic() - self.since

    @property
    def expected(self) -> tuple[Round, Round]:
        """The rounds that may come next, for an engine that decodes in rounds: the last and the widest so far."""
        if self.engine is None or self.engine.name == "vllm":
            return NO_ROUND, NO_ROUND
        return self.last, max(self.before, self.widest)

    def enter(self, call: Call) -> Request:
        """A call as the engine takes it; of each key one at a time."""
        key = self.keys.number_of(call, self.number)
        if key in self.open:
            key = self.keys.new()
        self.open[key] = call
        return Request(key, call.ids, call.params.max_tokens, call.seed)


def turn_of(call: Call, rollout: Rollout) -> Turn:
    """Return a completion as a turn, with the version of the live policy, of the adapter, or -1 for the base model."""
    usual = -1 if call.adapter is None else 0
    version = rollout.policy_version if call.adapter == LIVE else usual if call.version is None else call.version
    return Turn(call.ids, rollout.completion_ids, rollout.rollout_logprobs, rollout.finish_reason, rollout.text,
                version, rollout.cached_tokens, exact=call.params.temperature == 1 and not call.params.truncates,
                routes=rollout.routes)
