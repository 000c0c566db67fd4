"""`RequestQueue`: calls and tasks for an engine's owner, fair to users; `EngineSession`: the calls in the engine."""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Engine, OnTokens, Request
from lowmem_grpo.types import Rollout, Turn

LIVE = "live"  # the adapter in the model, as it is during sampling
Line = tuple[str, tuple[object, ...] | None]
Round = tuple[int, float]  # the number of calls served together, and the seconds until all were finished
NO_ROUND: Round = (0, 0.0)
QUIET = 0.05  # the next round starts after this fraction of a round's seconds without a new call
LEAST, MOST_QUIET = 0.003, 0.1  # bounds of that wait, in seconds
logger = logging.getLogger(__name__)
MOST = 4096  # remembered conversation numbers; an engine caches fewer
SLICE = 64  # tokens that a call samples before it makes room for another user


@dataclass(eq=False)
class EngineCall:
    """A requested completion. Calls with equal `batch_key` are decoded together."""

    ids: list[int]  # (P,) prompt tokens
    params: SamplingParams  # n is 1; max_tokens and seed may differ within a batch
    adapter: Path | str | None = LIVE  # the folder of a saved adapter, LIVE, or None for the base model
    key: int | None = None  # the number of the conversation, whose KV cache is reused; None for a new one
    version: int | None = None  # the policy version, if `adapter` is a saved one
    future: "Future[Turn]" = field(default_factory=Future)
    seed: int = 0  # the resolved seed, set by the worker
    user: str = ""  # users have turns
    on_tokens: OnTokens | None = None  # as in `Request`
    begun: Rollout | None = None  # its first tokens, if it was interrupted, and the number of its KV cache
    number: int | None = None
    drawn: int = 0  # tokens since it entered the engine
    interrupted: bool = False  # it leaves the engine now, to go on later

    @cached_property
    def batch_key(self) -> tuple[object, ...]:
        """The settings that all calls of one engine session share."""
        params = self.params
        return (self.adapter, params.temperature, params.top_p, params.top_k, params.min_p,
                tuple(params.stop_strings), tuple(params.stop_token_ids or ()), params.ignore_eos)


class WorkerClosedError(RuntimeError):
    """Raised for calls and tasks after the worker was closed."""


@dataclass(eq=False)
class WorkerTask:
    function: Callable[[], Any]
    sleep: bool  # whether the engine frees its memory first
    user: str = ""
    adapter: Path | str | None = None  # the one that it computes with, as in `EngineCall`
    future: "Future[Any]" = field(default_factory=Future)


class RequestQueue:
    """The calls and tasks that wait: a line for each user and `batch_key` (None: tasks). Users have turns, and within a
    turn of a user the user's lines. In a turn at most `turn` calls are taken from a user (None: any number)."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.lines: dict[Line, deque[Any]] = {}  # non-empty ones, the next to serve first
        self.turn: int | None = None
        self.closed = False

    def add(self, item: EngineCall | WorkerTask, first: bool = False) -> None:
        """Queue an item: last in its line or, if it was interrupted, as the `first` of its user's next turn. If the
        queue is closed already, the item's future raises WorkerClosedError instead."""
        with self.changed:
            if self.closed:
                if item.future.set_running_or_notify_cancel():  # one that was interrupted may be cancelled meanwhile
                    item.future.set_exception(WorkerClosedError(
                        "the engine is closed: nothing is sampled or run any more; start the server or register the "
                        "model again"))
                return
            line = item.user, item.batch_key if isinstance(item, EngineCall) else None
            waiting = self.lines.setdefault(line, deque())
            if first:
                waiting.appendleft(item)
                self.end_turn(line)
            else:
                waiting.append(item)
            self.changed.notify_all()

    def next(self) -> WorkerTask | EngineCall | None:
        """Wait for an item. Return a task to run, or a call (left in its queue) to serve; None after `close`."""
        with self.changed:
            self.changed.wait_for(lambda: self.lines or self.closed)
            if self.closed:
                return None
            line = next(iter(self.lines))
            if line[1] is not None:
                call: EngineCall = self.lines[line][0]
                return call
            job: WorkerTask = self.lines[line].popleft()
            self.end_turn(line)
            return job

    def end_turn(self, served: Line) -> None:
        """Move a user's lines behind those of others, and the one that was served behind the user's own."""
        own = sorted((line for line in self.lines if line[0] == served[0]), key=lambda line: line == served)
        for line in own:
            if waiting := self.lines.pop(line):
                self.lines[line] = waiting

    def take_calls(
        self, batch_key: tuple[object, ...], most: int | None, wait: bool, first: bool, expected: Round
    ) -> list[EngineCall]:
        """Return up to `most` calls (None: all) with this `batch_key`, one of each user after another. If items of
        another key wait, return none, unless these are the `first` calls of a session.

        With `wait`, block until an item comes, and then until there are as many calls as in the `expected` round. Stop
        waiting if an item of another key comes, or if no call comes for a fraction of that round's seconds."""
        with self.changed:
            if wait:
                self.changed.wait_for(lambda: self.lines or self.closed)
                count, quiet = expected[0], min(max(LEAST, QUIET * expected[1]), MOST_QUIET)
                while not self.closed and self.only(batch_key) and sum(map(len, self.lines.values())) < count:
                    if not self.changed.wait(quiet):
                        break
            if self.closed or (not first and not self.only(batch_key)):
                return []
            lines = [line for line in self.lines if line[1] == batch_key]
            each = max((len(self.lines[line]) for line in lines), default=0)
            calls = [(line, place) for place in range(min(each, self.turn or each)) for line in lines
                     if place < len(self.lines[line])]
            taken = [self.lines[line].popleft() for line, _ in calls[:most]]
            for line in dict(calls[:most]):
                self.end_turn(line)
            return taken

    def others_wait(self, user: str) -> bool:
        """Return whether users have turns, and anything of another user waits that was not cancelled."""
        with self.changed:
            return self.turn is not None and any(
                line[0] != user and any(not item.future.cancelled() for item in waiting)
                for line, waiting in self.lines.items())

    def interrupted(self) -> set[int]:
        """Return the numbers of the waiting calls that were interrupted and not cancelled."""
        with self.changed:
            return {call.number for line, waiting in self.lines.items() if line[1] is not None for call in waiting
                    if call.number is not None and not call.future.cancelled()}

    def adapters(self) -> set[object]:
        """Return the adapters that the waiting calls and tasks need."""
        with self.changed:
            return {item.adapter for waiting in self.lines.values() for item in waiting}

    def only(self, batch_key: tuple[object, ...]) -> bool:
        return all(line[1] == batch_key for line in self.lines)

    def drain(self, batch_key: tuple[object, ...]) -> list[EngineCall]:
        with self.changed:
            lines = [line for line in self.lines if line[1] == batch_key]
            return [call for line in lines for call in self.lines.pop(line)]

    def close(self) -> list[EngineCall | WorkerTask]:
        """Refuse new items, and return those that waited."""
        with self.changed:
            self.closed = True
            left = [item for line in self.lines.values() for item in line]
            self.lines.clear()
            self.changed.notify_all()
            return left


class Keys:
    """Unique numbers for each conversation and set of weights, so that an engine never mixes up KV caches."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.known: dict[tuple[object, ...], int] = {}  # by adapter, caller's key and session; most recently used last

    def new(self) -> int:
        return next(self.numbers)

    def number_of(self, call: EngineCall, engine_session: int) -> int:
        """Return the number of a call's conversation; sessions share none for a saved adapter, which may change."""
        if call.key is None:
            return self.new()
        name = (call.adapter, call.key, None if call.adapter in (LIVE, None) else engine_session)
        self.known[name] = number = self.known.pop(name) if name in self.known else self.new()
        if len(self.known) > MOST:
            del self.known[next(iter(self.known))]
        return number


class EngineSession:
    """The calls that an engine decodes together. When other items wait, no new calls enter, and the session ends."""

    goes_on = True  # a later session continues, so the engine keeps its KV cache

    def __init__(
        self, waiting: RequestQueue, batch_key: tuple[object, ...], keys: Keys, before: Round = NO_ROUND
    ) -> None:
        """`before` is the round with the most calls in earlier sessions; it predicts the size of the first round."""
        self.waiting, self.batch_key, self.keys, self.number = waiting, batch_key, keys, keys.new()
        self.before, self.widest = before, NO_ROUND  # `widest` is the round of this session with the most calls
        self.open: dict[int, EngineCall] = {}
        self.engine: Engine | None = None  # once it is awake; its free slots bound the calls that are taken
        self.begun = False
        self.back, self.since = 0, time.monotonic()  # calls finished since the engine took calls, and when

    def next_requests(self, busy: bool) -> list[Request]:
        self.widest = max(self.widest, self.last)
        while taken := self.waiting.take_calls(self.batch_key, self.room, not busy, not self.begun, self.expected):
            self.begun, self.back, self.since = True, 0, time.monotonic()
            if requests := [self.enter(call) for call in taken if not call.future.cancelled()]:
                return requests
        return []

    def add_rollout(self, key: int, rollout: Rollout) -> None:
        call = self.open.pop(key)
        if call.interrupted:
            self.interrupt(call, key, rollout)
            return
        self.back += 1
        if call.future.set_running_or_notify_cancel():
            call.future.set_result(turn_of(call, rollout))

    def fail(self, error: BaseException) -> None:
        """Fail the calls in the engine with this error, or if there are none, the waiting calls of this `batch_key`."""
        left = list(self.open.values()) or self.waiting.drain(self.batch_key)
        self.open.clear()
        logger.warning("%d calls failed with the engine: %s: %s", len(left), type(error).__name__, error)
        for call in left:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(error)

    def check_done(self) -> None:
        """Raise RuntimeError if the engine ended the session without answering all calls."""
        if self.open:
            name = getattr(self.engine, "name", self.engine)
            raise RuntimeError(f"the engine {name} did not answer {len(self.open)} of its calls")

    def awaited(self) -> set[int]:
        return self.waiting.interrupted()

    @property
    def room(self) -> int | None:
        """The number of further calls that the engine can decode now; None for no bound."""
        slots = getattr(self.engine, "slots", None)  # a caller's own engine may not have it
        return None if slots is None else max(0, slots - len(self.open))

    @property
    def last(self) -> Round:
        """The calls finished since the engine last took calls, and the seconds since then."""
        return self.back, time.monotonic() - self.since

    @property
    def expected(self) -> Round:
        """The predicted calls and seconds of the next round; `NO_ROUND` if the engine does not decode in rounds."""
        if self.engine is None or self.engine.name == "vllm":
            return NO_ROUND
        return self.last if self.begun else self.before

    def enter(self, call: EngineCall) -> Request:
        """Add a call, and return its engine request, with a new key if the call's key is in use."""
        key = self.keys.number_of(call, self.number) if call.number is None else call.number
        if key in self.open:
            key = self.keys.new()
        self.open[key] = call
        call.drawn, call.interrupted = 0, False
        on_tokens = partial(self.on_tokens, call) if getattr(self.engine, "resumes", False) else call.on_tokens
        return Request(key, call.ids, call.params.max_tokens, call.seed, on_tokens, call.begun)

    def on_tokens(self, call: EngineCall, tokens: list[int], logprobs: list[float]) -> bool:
        """Pass new tokens on; return False if the call is cancelled, or to interrupt it after SLICE tokens because
        something of another user waits. The weights of LIVE may be trained meanwhile, so its calls go on."""
        if call.future.cancelled() or (call.on_tokens is not None and not call.on_tokens(tokens, logprobs)):
            return False
        call.drawn += len(tokens)
        call.interrupted = call.drawn >= SLICE and call.adapter != LIVE and self.waiting.others_wait(call.user)
        return not call.interrupted

    def interrupt(self, call: EngineCall, key: int, rollout: Rollout) -> None:
        """Queue a call again, to go on behind its first tokens, and with their KV cache if the engine still has it."""
        call.begun, call.number = rollout, key
        self.waiting.add(call, first=True)


def turn_of(call: EngineCall, rollout: Rollout) -> Turn:
    """Return a completion as a turn, with the version of the live policy or saved adapter, or -1 for the base model."""
    usual = -1 if call.adapter is None else 0
    version = rollout.policy_version if call.adapter == LIVE else usual if call.version is None else call.version
    return Turn(call.ids, rollout.completion_ids, rollout.rollout_logprobs, rollout.finish_reason, rollout.text,
                version, rollout.cached_tokens, exact=call.params.temperature == 1 and not call.params.truncates,
                routes=rollout.routes)
