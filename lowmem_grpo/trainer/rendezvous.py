"""The rendezvous of a run's ranks, and `Heartbeat`, which finds lost ranks. torch alone cannot tell a rank that samples
for ten minutes from a rank that was stopped."""

import atexit
import json
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from lowmem_grpo.config.launcher import Place

BEAT, PATIENCE = 1.0, 30.0  # seconds between two beats of a rank; seconds without one after which it is lost
START, PAUSE = timedelta(minutes=10), 0.02  # limit for all ranks to join; seconds between two checks
LAST = 5.0  # the most seconds that the first rank waits at its exit, so that other ranks can read why the run failed
LONGEST = 500  # the most characters of an error
GOOD = "The last checkpoint is good; start all of them again to go on from it"


class RankError(RuntimeError):
    """Another process of the run failed, is lost, or called another collective operation; the message says which."""


class Heartbeat:
    """Writes a beat to the store every second, in a thread, and reads the other ranks' beats. So the ranks wait for a
    slow rank however long it takes, but an error names a rank that was killed, was stopped or cannot be reached. Only
    the thread uses the store: if the store's process (first rank or launcher) is stopped, a call never returns."""

    def __init__(self, store: Any, place: Place, beat: float = BEAT, patience: float = PATIENCE) -> None:
        self.store, self.rank, self.count, self.beat, self.patience = store, place.rank, place.count, beat, patience
        self.answered = time.monotonic()  # when the store last answered
        self.seen = dict.fromkeys(range(place.count), (0, self.answered))  # each rank's beats, and since when
        self.broken = ""  # why the run ends
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run, name="heartbeat", daemon=True)
        self.thread.start()
        atexit.register(self.close)  # a thread inside torch at interpreter exit would abort the process

    def close(self) -> None:
        """Stop the beats, and wait for the thread."""
        self.ended.set()
        self.thread.join(self.patience)

    def run(self) -> None:
        """Beat until this rank closes or the run is broken; then tell the others why."""
        with suppress(RuntimeError):  # the store has ended, with the process that holds it
            while not self.ended.wait(self.beat) and not self.broken:
                self.exchange()
            if self.broken:
                self.store.set("broken", json.dumps(self.broken))
            left, until = self.store.add("left", 1), time.monotonic() + LAST
            while not self.rank and left < self.count and time.monotonic() < until:  # the store may end with this rank
                time.sleep(PAUSE)
                left = self.store.add("left", 0)

    def exchange(self) -> None:
        """Write this rank's beat, and read the beats of all ranks and, if the run is broken, the reason."""
        self.store.add(f"beat/{self.rank}", 1)
        beats, now = [self.store.add(f"beat/{rank}", 0) for rank in range(self.count)], time.monotonic()
        self.seen |= {rank: (beat, now) for rank, beat in enumerate(beats) if beat != self.seen[rank][0]}
        told = json.loads(self.store.get("broken")) if self.store.check(["broken"]) else ""
        lost = next((rank for rank, (_, since) in self.seen.items() if now - since > self.patience), None)
        self.broken = self.broken or told or ("" if lost is None else self.missing(lost))
        self.answered = now

    def missing(self, rank: int) -> str:
        """Return the message for a lost rank."""
        return (f"rank {rank} is lost: no sign of life for {self.patience:.0f} s while rank {self.rank} waits for it. "
                f"Its process was killed or hangs, or its machine cannot be reached. {GOOD}")

    def check(self, began: float) -> None:
        """Raise RankError if a rank failed or is lost, or if the store was silent for too long since `began`."""
        if not self.broken and time.monotonic() - max(began, self.answered) > self.patience + self.beat:
            self.broken = self.missing(0)
        if self.broken or self.ended.is_set():
            raise RankError(self.broken or "the ranks have parted already")

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank fails, unless the error came from them."""
        if not isinstance(error, RankError) and not self.broken:
            self.broken = f"rank {self.rank} has failed: {type(error).__name__}: {error}"[:LONGEST]
            self.ended.set()
            self.thread.join(2 * LAST)

    def explain(self, what: str, error: BaseException) -> None:
        """Raise RankError for a transfer that broke off, with the reason as soon as one is known."""
        began = time.monotonic()
        while time.monotonic() - began < self.patience + 3 * self.beat:
            self.check(began)
            time.sleep(PAUSE)
        raise RankError(f"the connection between the ranks broke off at {what!r} ({error}): one of them has died, or "
                        f"cannot be reached. {GOOD}") from error


def find_others(place: Place) -> Any:
    """Return torch's store once all processes of this launch have joined; RankError if they do not."""
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=START))
        store.set_timeout(START)
        return part_of_start(store, place.rank, place.count, START)
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise RankError(f"rank {place.rank} of {place.count} did not find the others: {error}. Start all of them with "
                        "one torchrun, or with the same MASTER_ADDR and MASTER_PORT") from error


def part_of_start(store: Any, rank: int, count: int, timeout: timedelta) -> Any:
    """Return a part of the store that only this launch uses, because a launcher that restarts the processes may keep
    its store with the former processes' keys. Each process takes a new name, and all agree on the list of names as the
    prefix, since torchrun's counts of restarts differ from machine to machine. TimeoutError, with the missing ranks, if
    they do not all join in time."""
    keys, end = [f"name/{each}" for each in range(count)], time.monotonic() + timeout.total_seconds()
    store.set(keys[rank], uuid4().hex)
    while True:
        names = "-".join(store.get(key).decode() if store.check([key]) else "" for key in keys)
        agreed = [f"{names}/{each}" for each in range(count)]
        store.set(agreed[rank], "")
        if store.check(agreed):
            return dist.PrefixStore(names, store)
        if time.monotonic() > end:
            late = ", ".join(str(each) for each, key in enumerate(agreed) if not store.check([key]))
            raise TimeoutError(f"rank {late} did not come within {timeout.total_seconds():.0f} s")
        time.sleep(PAUSE)
