"""A run in the list of a page."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Listed:
    """What the list says of a run, and what its buttons are."""

    name: str
    """By which an address names it."""
    title: str
    state: str
    """The class of its colour: running, finished, failed and so on."""
    words: str
    """Its state in a word."""
    why: str = ""
    """Why it waits or has ended, and which process writes it."""
    written: float = 0.0
    """Seconds since 1970: when it came, or when its newest record was written; 0.0 where nobody knows."""
    actions: tuple[str, ...] = ()
    """What can be done with it: stop, resume, export."""
    run_state: str = ""
    """What is known of the run beside what its summary says: running, killed, silent."""
    can_show: bool = True
    """Whether it has begun to write."""


def ago(when: float, now: float | None = None) -> str:
    """How long ago in words, to show that a run writes or no longer does."""
    seconds = max(0.0, (time.time() if now is None else now) - when)
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "just now"
