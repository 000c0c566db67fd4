"""One call of a reward function: its arguments, its thread or task, its time limit and its result."""

import asyncio
import math
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from lowmem_grpo.rewards.calling.background import BackgroundLoop, start_thread
from lowmem_grpo.rewards.calling.contract import (
    RewardError,
    RewardFunction,
    TooLateError,
    as_list,
    as_number,
    as_rewards,
    bind,
    own_limit,
)
from lowmem_grpo.rewards.reward import MeanOf
from lowmem_grpo.types import owned

POLL_SECONDS = 0.1  # between checks for failures, and for Ctrl-C, which some systems deliver only between waits

SIGNAL: Any = getattr(signal, "SIGRTMAX", getattr(signal, "SIGUSR2", None))  # None on Windows; SIGALRM stays free
NONE_MADE = "; environments holds None for each that could not be made, and the log says why"
AGAIN = 1.0  # seconds until the signal is sent again, for code that catches everything

Lists = dict[str, list[Any]]  # arguments of a call with one entry per completion


@dataclass
class CallRecorder:
    """Collects the values that a function logs during one call."""

    num_completions: int
    extras: dict[str, list[Any]] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Keep one value per completion; a second call for the same column replaces the first."""
        values = as_list(values)
        if len(values) != self.num_completions:
            raise RewardError(f"log_extra({column!r}) got {len(values)} values, expected {self.num_completions}")
        self.extras[column] = values

    def log_metric(self, name: str, value: Any) -> None:
        if (number := as_number(value)) is None:
            raise RewardError(f"log_metric({name!r}) got None, expected a number")
        self.values[name].append(MeanOf(number, value.count) if isinstance(value, MeanOf) else number)

    def weighted(self, name: str) -> list[tuple[float, float]]:
        """Return (value, weight) for each value logged under `name`; the weight of a MeanOf is its `count`."""
        values = self.values[name]
        return [(value, value.count if isinstance(value, MeanOf) else (self.num_completions or 1) / len(values))
                for value in values]


class RewardCall:
    """One call of a function on N completions; `run`, `run_alone` or `run_in_loop` begins it."""

    def __init__(self, name: str, func: RewardFunction, lists: Lists, state: Any, timeout: float,
                 groups: Sequence[int] = ()) -> None:
        """`groups`: indices of the groups in `lists` (none: the whole batch). MissingColumnError as in `bind`."""
        self.name, self.completions = name, lists["completions"]
        self.own_limit = own_limit(func)
        self.limit = timeout if self.own_limit is None else self.own_limit
        self.recorder = CallRecorder(len(self.completions))
        shared = {"trainer_state": state, "log_extra": self.recorder.log_extra, "log_metric": self.recorder.log_metric}
        self.func = bind(name, func, {**lists, **shared})
        self.lists = lists.keys() - {"environments"}  # the arguments to copy; environments are never copied
        # None in `environments` stands for one that could not be made
        self.lacks_some = any(made is None for made in lists.get("environments") or ())
        self.future: Future[Any] = Future()
        self.groups = groups
        self.began = self.ended = 0.0

    def bound(self) -> Any:
        """Call the function with copies of its lists, so that changes to them affect no other call, record or step."""
        arguments = {name: owned(value) if name in self.lists else value for name, value in self.func.keywords.items()}
        return self.func.func(**arguments)

    def run(self) -> None:
        """Call the function in this thread, and set `future` to its result or error. A cancelled call does nothing."""
        if not self.future.set_running_or_notify_cancel():
            return
        self.began = time.monotonic()
        try:
            result = self.bound()
        except BaseException as error:  # noqa: BLE001, raised again in the thread that waits
            self.note_end()
            self.future.set_exception(error)
        else:
            self.note_end()
            self.future.set_result(result)

    def run_alone(self) -> None:
        """In the main thread, run the call to its end or time limit, so that signal.alarm works as in TRL. In any other
        thread, start the call in a daemon thread, and return at once."""
        if SIGNAL is not None and threading.current_thread() is threading.main_thread():
            with suppress(OverTime), time_limit(self.limit):
                self.run()
            if self.future.done() and isinstance(error := failure(self.future), KeyboardInterrupt):
                raise error
        else:
            self.began = time.monotonic()
            start_thread(f"reward {self.name}", self.run)

    def run_in_loop(self, loop: BackgroundLoop) -> None:
        self.began = time.monotonic()
        self.future = loop.submit(self.bound)
        self.future.add_done_callback(lambda _: self.note_end())

    def note_end(self) -> None:
        self.ended = time.monotonic()

    @property
    def rewards(self) -> list[float | None]:
        """The rewards (N,) of the finished call. RewardError if its result is not a list of N rewards."""
        return as_rewards(self.name, self.future.result(), len(self.completions))

    @property
    def interval(self) -> tuple[float, float]:
        """(begin, end) on the monotonic clock. While the call runs, its end is the current time."""
        return self.began, self.ended or time.monotonic()

    @property
    def late(self) -> bool:
        """Whether the call has run longer than its time limit, even if it has finished since."""
        began, ended = self.interval
        stopped = self.future.done() and isinstance(failure(self.future), OverTime)
        return stopped or (bool(began) and ended - began >= self.limit)


def wait_for(calls: list[RewardCall]) -> None:
    """Wait until all calls have ended. RewardError if a call fails, TooLateError if a call exceeds its time limit.
    Either error cancels the other async calls; threads cannot be stopped."""
    try:
        while True:
            check(calls)
            if not (pending := {call.future for call in calls if not call.future.done()}):
                return
            wait(pending, pause(calls), FIRST_EXCEPTION)
    finally:
        stop(calls)


def check(calls: list[RewardCall]) -> None:
    """Raise RewardError if a call failed, and TooLateError if a call exceeded its time limit, even if it returned."""
    for call in calls:
        if call.future.done() and not isinstance(error := failure(call.future), (NoneType, OverTime)):
            first = repr(call.completions[0])[:120] if call.completions else None
            raise RewardError(f"reward function {call.name} raised {type(error).__name__}: {error}; the first "
                              f"completion begins {first}" + NONE_MADE * call.lacks_some) from error
    late = [call for call in calls if call.late]
    for own in (True, False):
        if names := list(dict.fromkeys(call.name for call in late if (call.own_limit is not None) == own)):
            limit = max(call.limit for call in late if call.name in names)
            setting = "its time_limit" if own else "GRPOConfig(reward_timeout=...)"
            raise TooLateError(f"reward function {', '.join(names)} did not return within {limit:g} s; raise the limit "
                               f"with {setting}")


def pause(calls: list[RewardCall]) -> float:
    """Return the seconds until the next time limit of an unfinished call, at most POLL_SECONDS."""
    now = time.monotonic()
    return max(0.0, min([POLL_SECONDS, *(call.began + call.limit - now for call in calls if not call.future.done())]))


def stop(calls: list[RewardCall]) -> None:
    for call in calls:
        call.future.cancel()


def failure(future: Future[Any]) -> BaseException | None:
    """Return the error of a finished call, None if it has none. A cancelled coroutine counts as an error."""
    return asyncio.CancelledError() if future.cancelled() else future.exception()


class OverTime(BaseException):
    """Raised inside code that passes its time limit; a BaseException, so `except Exception` does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OverTime inside the block, in the main thread, after this many seconds, and again every second. Native code
    is interrupted only when it returns to the interpreter."""
    if not math.isfinite(seconds):
        yield
        return
    done = threading.Event()

    def end_code(*_: Any) -> None:
        if not done.is_set():
            raise OverTime

    previous = signal.signal(SIGNAL, end_code)
    watchdog = threading.Thread(target=watch, args=(done, seconds), name="time limit", daemon=True)
    watchdog.start()
    try:
        try:
            yield
        finally:
            done.set()
    finally:
        done.set()  # again, because the signal may interrupt the line above
        watchdog.join()  # no signal can come after this
        signal.signal(SIGNAL, previous)


def watch(done: threading.Event, seconds: float) -> None:
    """Send SIGNAL to the main thread after `seconds`, then every AGAIN seconds, until `done` is set."""
    main: Any = threading.main_thread().ident
    while not done.wait(seconds):
        signal.pthread_kill(main, SIGNAL)
        seconds = AGAIN
