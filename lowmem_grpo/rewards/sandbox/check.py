"""Says in one line, for `doctor`, which sandbox for model-written code works here.

The trials start first, run in the background, and are asked last. A trial that has not ended then gets a little more
time, and otherwise counts as unknown: a sandbox that hangs must not hold up everything else.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

WAIT = 1.0  # seconds at the end, for all trials together


class SandboxTrials:
    """Tries each isolation in a thread of its own. `load` returns `rewards.sandbox.isolation`, or raises any error."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._reasons: dict[str, str | None] = {}  # by isolation: why it does not work, None where it does
        self._threads: dict[str, threading.Thread] = {}
        self._broken = ""
        try:
            isolation = load()
            self._by_default = isolation.BY_DEFAULT
            for name in isolation.ISOLATIONS:
                thread = threading.Thread(target=self._try, args=(isolation, name), daemon=True)
                self._threads[name] = thread
                thread.start()
        except Exception as error:  # noqa: BLE001 - whatever it is, the line reports it
            self._broken = f"{type(error).__name__}: {error}"

    def _try(self, isolation: Any, name: str) -> None:
        try:
            self._reasons[name] = isolation.why_not(name)
        except Exception as error:  # noqa: BLE001 - see above
            self._reasons[name] = f"{type(error).__name__}: {error}"

    def line(self, wait: float = WAIT) -> str:
        """Return one line: the isolation that is taken by default, and why the others are not."""
        if self._broken:
            return f"unknown ({self._broken})"
        deadline = time.monotonic() + wait
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        reasons = dict(self._reasons)  # a late thread changes nothing any more
        works = [name for name in self._threads if name in reasons and reasons[name] is None]
        taken = self._by_default if self._by_default in works else None
        head = taken or ("none by default, process if asked for" if works else "none")
        states = {name: "works" if why is None else " ".join(why.split())[:120] for name, why in reasons.items()}
        others = (f"{name}: {states.get(name, 'no answer yet')}" for name in self._threads if name != taken)
        return f"{head} ({'; '.join(others)})"
