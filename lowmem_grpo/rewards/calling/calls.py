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

from lowmem_grpo.data.owned import owned
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

POLL_SECONDS = 0.1  # between checks for failures, and for Ctrl-C, which some systems deliver only between waits

SIGNAL: Any = getattr(signal, "SIGRTMAX", getattr(signal, "SIGUSR2", None))  # None on Windows; SIGALRM stays free
NONE_MADE = "; environments holds None for each that could not be made, and the log says why"
AGAIN = 1.0  # seconds until it is raised once more in code that catches everything

Lists = dict[str, list[Any]]  # arguments of a call that have an entry for each completion


@dataclass
class CallRecorder:
    """Collects what a function logs while a batch of completions is scored."""

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
        """(value, weight) of all that was logged under a name; the weight is how many values it is the mean of. Plain
        numbers share the completions of the call between them: a single one is a mean over all of these."""
        values = self.values[name]
        return [(value, value.count if isinstance(value, MeanOf) else (self.num_completions or 1) / len(values))
                for value in values]


class Call:
    """A named function with its lists of N completions. One of the methods `run...` begins the call."""

    def __init__(self, name: str, func: RewardFunction, lists: Lists, state: Any, timeout: float,
                 groups: Sequence[int] = ()) -> None:
        """`groups` are the numbers of those that it scores; without any it scores the whole batch. Raises
        MissingColumnError if the function needs an argument that is not there."""
        self.name, self.completions = name, lists["completions"]
        self.own_limit = own_limit(func)
        self.limit = timeout if self.own_limit is None else self.own_limit
        self.recorder = CallRecorder(len(self.completions))
        shared = {"trainer_state": state, "log_extra": self.recorder.log_extra, "log_metric": self.recorder.log_metric}
        self.func = bind(name, func, {**lists, **shared})
        self.lists = lists.keys() - {"environments"}  # those are the ones that were played
        self.lacks_some = any(made is None for made in lists.get("environments") or ())  # that could not be made
        self.future: Future[Any] = Future()
        self.groups = groups
        self.began = self.ended = 0.0

    def bound(self) -> Any:
        """Call the function with objects of its own: what it changes is seen by no other call, record or step."""
        arguments = {name: owned(value) if name in self.lists else value for name, value in self.func.keywords.items()}
        return self.func.func(**arguments)

    def run(self) -> None:
        """Run here and now, unless it was stopped before. `future` gets what it returns or raises."""
        if not self.future.set_running_or_notify_cancel():
            return
        self.began = time.monotonic()
        try:
            result = self.bound()
        except BaseException as error:  # noqa: BLE001, the thread that asked raises it again
            self.note_end()
            self.future.set_exception(error)
        else:
            self.note_end()
            self.future.set_result(result)

    def run_alone(self) -> None:
        """Begin in this thread where it is the main one, so that signal.alarm works as in TRL, and end at the time
        limit; elsewhere in a daemon thread of its own, with the caller's context variables."""
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
        """The rewards (N,) that the finished call returned. RewardError for what is not a list of rewards."""
        return as_rewards(self.name, self.future.result(), len(self.completions))

    @property
    def interval(self) -> tuple[float, float]:
        """When it began and when it ended, or now if it still runs; on the monotonic clock."""
        return self.began, self.ended or time.monotonic()

    @property
    def late(self) -> bool:
        """Whether it has passed its time limit, finished or not."""
        began, ended = self.interval
        stopped = self.future.done() and isinstance(failure(self.future), OverTime)
        return stopped or (bool(began) and ended - began >= self.limit)


def wait_for(calls: list[Call]) -> None:
    """Wait until calls that run side by side have ended. RewardError for the first that fails, TooLateError for those
    that pass their time limits: async calls are then stopped, and nothing can stop a thread."""
    try:
        while True:
            check(calls)
            if not (pending := {call.future for call in calls if not call.future.done()}):
                return
            wait(pending, pause(calls), FIRST_EXCEPTION)
    finally:
        stop(calls)


def check(calls: list[Call]) -> None:
    """Raise RewardError for a call that has failed, and TooLateError for those that have passed their time limits,
    whether anyone waited for them or not."""
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


def pause(calls: list[Call]) -> float:
    """Return the seconds to wait for a change: until the next time limit, and at most POLL_SECONDS."""
    now = time.monotonic()
    return max(0.0, min([POLL_SECONDS, *(call.began + call.limit - now for call in calls if not call.future.done())]))


def stop(calls: list[Call]) -> None:
    for call in calls:
        call.future.cancel()


def failure(future: Future[Any]) -> BaseException | None:
    """Return the error of a finished call. A coroutine that cancelled itself counts as an error too."""
    return asyncio.CancelledError() if future.cancelled() else future.exception()


class OverTime(BaseException):
    """Raised inside of code that takes longer than it may; `except Exception` does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OverTime inside of the block, in the main thread, when it has taken this long, and each second after that.
    Code that waits is woken; code that computes outside of Python's interpreter is not ended before it comes back."""
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
        done.set()  # the signal may come within the line above
        watchdog.join()  # from here on no signal comes
        signal.signal(SIGNAL, previous)


def watch(done: threading.Event, seconds: float) -> None:
    """Send the signal to the main thread until the block is done."""
    main: Any = threading.main_thread().ident
    while not done.wait(seconds):
        signal.pthread_kill(main, SIGNAL)
        seconds = AGAIN
