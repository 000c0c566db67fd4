"""One start of a run's processes. A launcher that starts them again may keep its store, with all that the former
processes left in it: what they wrote must not be taken for what the new ones write."""

import json
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore

PAUSE = 0.02  # seconds between two looks at the store


def own_part(store: Any, rank: int, count: int, timeout: timedelta) -> PrefixStore:
    """A part of the store that only the processes of this start use. TimeoutError, with the ranks that are missing,
    where they do not all come in time.

    Each process writes a name that nobody had before. The first one publishes all of them with a name for this start;
    whoever finds its own name among them agrees, and once all have agreed the first one opens the start.
    """
    name = uuid.uuid4().hex
    store.set(f"name/{rank}", name)
    found = invite(store, count, name, timeout) if rank == 0 else follow(store, rank, name, timeout)
    return PrefixStore(f"start/{found}", store)


def invite(store: Any, count: int, start: str, timeout: timedelta) -> str:
    """In the first process: until all others have agreed to this start, which bears its name."""
    names, agreed = [[f"{what}/{rank}" for rank in range(1, count)] for what in ("name", f"agreed/{start}")]

    def all_agreed() -> bool:
        written = [store.get(key).decode() if store.check([key]) else "" for key in names]
        store.set("invited", json.dumps([start, *written]))  # again and again: a name may be of a former process
        return bool(store.check(agreed)) if agreed else True

    until(all_agreed, timeout, lambda: [rank for rank, key in enumerate(agreed, 1) if not store.check([key])])
    store.set(f"open/{start}", "")
    return start


def follow(store: Any, rank: int, name: str, timeout: timedelta) -> str:
    """In any other process: the start that has its name and is open."""
    invited: list[str] = []

    def is_open() -> bool:
        invited[:] = json.loads(store.get("invited")) if store.check(["invited"]) else []
        if len(invited) <= rank or invited[rank] != name:
            return False
        store.set(f"agreed/{invited[0]}/{rank}", "")
        return bool(store.check([f"open/{invited[0]}"]))

    until(is_open, timeout, lambda: [] if name in invited else [0])
    return invited[0]


def until(done: Callable[[], bool], timeout: timedelta, missing: Callable[[], list[int]]) -> None:
    """Wait; TimeoutError that names the ranks that are missing."""
    end = time.monotonic() + timeout.total_seconds()
    while not done():
        if time.monotonic() > end:
            ranks = ", ".join(map(str, missing())) or "others"
            raise TimeoutError(f"rank {ranks} did not come within {timeout.total_seconds():.0f} s")
        time.sleep(PAUSE)
