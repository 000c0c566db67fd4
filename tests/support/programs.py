"""Programs that a test starts and gives signals, and for which it never waits without an end."""

import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LONGEST = 200.0  # seconds until a program that hangs is killed, so that its test fails


@contextmanager
def usual_signals() -> Iterator[None]:
    """Inside, signals end this process and those that it starts, as usual: nohup and a shell's background jobs ignore
    some of them, and programs inherit that."""
    ending = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ending}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def program(*command: Any, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """A program whose output is read, and that is killed at the end of the block at the latest."""
    with usual_signals():
        started = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True, **options)
    with started:
        hangs = threading.Timer(LONGEST, started.kill)
        hangs.start()
        try:
            yield started
        finally:
            hangs.cancel()
            started.kill()
