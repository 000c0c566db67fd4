"""The rendezvous of a run's ranks, and `Pulse`, a barrier that detects lost ranks. torch cannot tell a rank that is
sampling for ten minutes from one that is stopped, and a call to a store whose process is stopped never returns."""

import atexit
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from lowmem_grpo.config.launcher import Place

PULSE, PATIENCE = 1.0, 30.0  # seconds between two words of a rank; seconds without one after which it is lost
START, PAUSE = timedelta(minutes=10), 0.02  # limit for all ranks to join; seconds between two checks
LAST = 5.0  # seconds to tell the others why a rank fails
WIDTH, LONGEST = 8192, 500  # bytes of a packed word; the most characters of its error
GOOD = "The last checkpoint is good; start all of them again to go on from it"


class RankError(RuntimeError):
    """Another process of the run has failed, is lost, or has come to another meeting; the message says which."""


class Word(NamedTuple):
    """The state of a rank: number and name of its last meeting, bytes of its data there, and why it fails."""

    number: int = 0
    what: str = ""
    size: int = 0
    failed: str = ""


class Pulse:
    """Exchanges a word with each other rank every second, in a thread. So the ranks wait for a slow one, however long
    it takes, and an error names one that was killed, was stopped or cannot be reached."""

    def __init__(self, group: Any, rank: int, count: int, pulse: float = PULSE, patience: float = PATIENCE) -> None:
        self.group, self.rank, self.others = group, rank, [other for other in range(count) if other != rank]
        self.pulse, self.patience = pulse, patience
        self.word, self.words = Word(), [Word()] * count  # this rank's current word; all words of the last meeting
        self.broken, self.ended = "", False
        self.waited = 0.0  # seconds spent waiting for other ranks, in all meetings
        self.news = threading.Condition()
        self.thread = threading.Thread(target=self.run, name="pulse", daemon=True)
        self.thread.start()
        atexit.register(self.close)  # a thread inside torch at interpreter exit would abort the process

    def close(self) -> None:
        """Stop the exchange, and wait for its thread."""
        with self.news:
            self.ended = True
            self.news.notify_all()
        self.thread.join(self.patience)

    def run(self) -> None:
        """Exchange words until this rank closes or one is lost; each rank that notices a loss tells the others."""
        while self.goes_on():
            self.exchange(self.patience)
        if self.broken:
            self.word = self.word._replace(failed=self.broken)
            self.exchange(LAST)

    def goes_on(self) -> bool:
        """Wait for the next pulse, or for news of this rank; returns False once the exchange has ended or broken."""
        with self.news:
            self.news.wait_for(lambda: self.ended or self.is_waiting or bool(self.word.failed), self.pulse)
            return not self.ended and not self.broken

    @property
    def is_waiting(self) -> bool:
        """True while this rank has come to a meeting and others have not."""
        return self.word.number > self.words[self.rank].number

    def exchange(self, seconds: float) -> None:
        """Send this rank's word to the others and receive theirs; in one round all ranks get the same words."""
        word, until = self.word, time.monotonic() + seconds
        heard, lost, moving = {self.rank: word}, dict[int, str](), dict[int, tuple[Tensor, Any, Any]]()
        sent = torch.frombuffer(bytearray(json.dumps(word).encode().ljust(WIDTH)), dtype=torch.uint8)
        for other in self.others:
            with noted(lost, other):
                space = torch.empty(WIDTH, dtype=torch.uint8)
                moving[other] = space, self.group.send([sent], other, 0), self.group.recv([space], other, 0)
        for other, (space, sending, receiving) in moving.items():
            with noted(lost, other):
                receiving.wait(until_then(until))
                heard[other] = Word(*json.loads(space.numpy().tobytes()))
                sending.wait(until_then(until))
        self.judge(heard, lost)

    def judge(self, heard: dict[int, Word], lost: dict[int, str]) -> None:
        """Evaluate the words of a round: a rank has failed or is lost, or all have come to the same meeting."""
        failed = [word.failed for word in heard.values() if word.failed]
        with self.news:
            if failed or lost:
                self.broken = self.broken or (failed or [self.missing(*next(iter(lost.items())))])[0]
            elif len({word.number for word in heard.values()}) == 1:
                self.words = [heard[rank] for rank in sorted(heard)]
            self.news.notify_all()

    def missing(self, rank: int, error: str) -> str:
        """Return the message for the first lost rank: once one does not answer, Gloo drops the others too."""
        why = f"no sign of life for {self.patience:.0f} s" if "imed out" in error else "its connection has ended"
        return (f"rank {rank} is lost: {why} while rank {self.rank} waits for it. Its process was killed or hangs, or "
                f"its machine cannot be reached. {GOOD}")

    def meet(self, what: str, size: int = 0) -> list[int]:
        """Wait until all ranks have come to `what`; returns the `size` of each. RankError if one cannot come."""
        began = time.monotonic()
        with self.news:
            self.check()
            self.word = Word(self.word.number + 1, what[: LONGEST // 5], size)
            self.news.notify_all()
            while self.is_waiting:
                self.check()
                self.news.wait(self.pulse)  # a timeout, so that Ctrl-C works
            self.waited += time.monotonic() - began
            other = next((rank for rank, word in enumerate(self.words) if word.what != self.word.what), None)
            if other is not None:
                self.broken = (
                    f"rank {other} has come to {self.words[other].what!r}, and rank {self.rank} to {what!r}: their "
                    "programs do not do the same; run one program with one set of settings in all of them")
            self.check()
            return [word.size for word in self.words]

    def check(self) -> None:
        """Raise RankError if a rank has failed or is lost."""
        if self.broken or not self.thread.is_alive():
            raise RankError(self.broken or "the ranks have parted already")

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank fails, unless the error came from them."""
        with self.news:
            if not isinstance(error, RankError) and not self.broken:
                said = f"rank {self.rank} has failed: {type(error).__name__}: {error}"
                self.word = self.word._replace(failed=said[:LONGEST])
                self.news.notify_all()
                self.news.wait_for(lambda: bool(self.broken), LAST)

    def explain(self, what: str, error: BaseException) -> None:
        """Raise RankError for a transfer that broke off, with the reason if one is known within LAST seconds."""
        with self.news:
            self.news.wait_for(lambda: bool(self.broken), LAST)
            self.check()
        raise RankError(f"the connection between the ranks broke off at {what!r} ({error}): one of them has died, or "
                        f"cannot be reached. {GOOD}") from error


def until_then(moment: float) -> timedelta:
    return timedelta(seconds=max(moment - time.monotonic(), 0.1))


@contextmanager
def noted(lost: dict[int, str], rank: int) -> Iterator[None]:
    """Catch an error inside, and record it as why the rank is lost; the first one is kept."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        lost.setdefault(rank, str(error))


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
    """Return a part of the store that only the processes of this launch use: a launcher that restarts them may keep its
    store, with the former processes' keys. Each process takes a new name, and all agree on the list of names, the
    prefix. TimeoutError, with the missing ranks, if they do not all join in time."""
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
