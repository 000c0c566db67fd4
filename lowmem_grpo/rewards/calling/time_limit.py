"""A time limit for code in the main thread: a signal ends it there. SIGALRM stays free for that code itself."""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNAL: Any = getattr(signal, "SIGRTMAX", getattr(signal, "SIGUSR2", None))  # None on Windows
AGAIN = 1.0  # seconds until it is raised once more in code that catches everything


class OverTime(BaseException):
    """Raised inside of code that takes longer than it may; `except Exception` does not catch it."""


def can_limit() -> bool:
    """Return whether `time_limit` works in this thread: only in the main one, and not on Windows."""
    return SIGNAL is not None and threading.current_thread() is threading.main_thread()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OverTime inside of the block, in the main thread, when it has taken this long, and each second after that.
    Code that waits is woken; code that computes outside of Python's interpreter is not ended before it comes back."""
    if not math.isfinite(seconds):
        yield
        return
    done = threading.Event()
    previous = signal.signal(SIGNAL, lambda *_: raise_unless(done))
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


def raise_unless(done: threading.Event) -> None:
    if not done.is_set():
        raise OverTime


def watch(done: threading.Event, seconds: float) -> None:
    """Send the signal to the main thread until the block is done."""
    main: Any = threading.main_thread().ident
    while not done.wait(seconds):
        signal.pthread_kill(main, SIGNAL)
        seconds = AGAIN
