"""`Meeting`: where the processes of a run wait for each other, and find out which of them is gone.

Each process writes into a common store where it has come, and every few seconds that it is alive. So a process that is
slow is waited for, however long; one that has died, hangs or cannot be reached is named, and one that failed says why.
"""

import atexit
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

PULSE = 2.0  # seconds between signs of life
PATIENCE = 30.0  # seconds without one, after which a process counts as lost
SHORTEST, LONGEST = 0.001, 0.05  # seconds between two looks at who has come
FAILED, HEARD = "failed", "heard"
LAST = 5.0  # seconds that whoever leads, whose process may hold the store, waits for others to read what was said last


class RankError(RuntimeError):
    """Another process of the run has failed or is lost, or does something else than this one; the message says which
    and what."""


class Meeting:
    """The processes of a run, as one of them sees the others. `store` is torch's, reached by all of them."""

    def __init__(self, store: Any, rank: int, count: int, pulse: float = PULSE, patience: float = PATIENCE) -> None:
        self.store, self.rank, self.count = store, rank, count
        self.patience, self.number = patience, 0
        self.waited = 0.0  # seconds for others, in all meetings
        self.broken: RankError | None = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.beat, args=(store.clone(), pulse), name="pulse", daemon=True)
        self.thread.start()
        atexit.register(self.close)  # a thread inside the store while the interpreter goes would abort the process

    def close(self) -> None:
        """Show no more that this process is alive."""
        self.ended.set()
        self.thread.join(LAST)

    def beat(self, store: Any, pulse: float) -> None:
        """Show every few seconds that this process is alive, over a connection of its own."""
        try:
            store.add(self.pulse_of(self.rank), 1)
            while not self.ended.wait(pulse):
                store.add(self.pulse_of(self.rank), 1)
        except Exception:  # noqa: BLE001 - the store is gone, which whoever meets finds out and tells
            return

    @staticmethod
    def pulse_of(rank: int) -> str:
        return f"pulse/{rank}"

    def meet(self, what: str, told: str = "") -> list[str]:
        """Wait until all processes have come to the same point, which `what` names; returns what each one told. What
        one tells has no line breaks. RankError if another one fails, is lost, or has come to another point."""
        if self.broken is not None:
            raise self.broken
        self.number += 1
        keys = [f"{self.number}/{rank}" for rank in range(self.count)]
        found = self.of_store(what, lambda: self.exchange(what, told, keys))
        for rank, one in enumerate(found):
            if one.partition("\n")[0] != what:
                self.end(f"rank {rank} has come to {one.partition(chr(10))[0]!r}, and rank {self.rank} to {what!r}: "
                         "their programs do not do the same; run one program with one set of settings in all of them")
        return [one.partition("\n")[2] for one in found]

    def exchange(self, what: str, told: str, keys: list[str]) -> list[str]:
        """Write where this process is, wait for the others, and read what they wrote."""
        self.store.set(keys[self.rank], f"{what}\n{told}")
        began = time.monotonic()
        self.wait(what, keys)
        self.waited += time.monotonic() - began
        if self.number > 2:  # all have read what was written two meetings ago
            self.store.delete_key(f"{self.number - 2}/{self.rank}")
        return [value.decode() for value in self.store.multi_get(keys)]

    def wait(self, what: str, keys: list[str]) -> None:
        """Until all keys are there."""
        pause, seen = SHORTEST, {rank: (0, time.monotonic()) for rank in range(self.count)}
        looked = 0.0
        while not self.store.check(keys):
            if time.monotonic() - looked > 2 * LONGEST:
                looked = time.monotonic()
                self.look_for_failure()
                self.look_for_lost(what, keys, seen)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)

    def look_for_failure(self) -> None:
        """RankError if a process has said that it failed."""
        if self.store.check([FAILED]):
            said = self.store.get(FAILED).decode()
            self.store.add(HEARD, 1)
            self.end(said)

    def look_for_lost(self, what: str, keys: list[str], seen: dict[int, tuple[int, float]]) -> None:
        """RankError if one that has not come gives no sign of life. `seen` has the last sign of each, and when."""
        now = time.monotonic()
        for rank, key in enumerate(keys):
            if self.store.check([key]):
                continue
            beats = self.store.add(self.pulse_of(rank), 0)
            if beats != seen[rank][0]:
                seen[rank] = beats, now
            elif now - seen[rank][1] > self.patience:
                self.end(f"rank {rank} is lost: no sign of life for {self.patience:.0f} s while rank {self.rank} waits "
                         f"for it at {what!r}. Its process was killed or hangs, or its machine cannot be reached. The "
                         "last checkpoint is good; start all of them again to go on from it")

    def of_store(self, what: str, call: Callable[[], list[str]]) -> list[str]:
        """What a call to the store returns; RankError where the store cannot be reached."""
        try:
            return call()
        except RankError:
            raise
        except Exception as error:  # torch raises several kinds for a lost connection
            self.end(f"the meeting point of the ranks is gone while rank {self.rank} waits at {what!r} ({error}): the "
                     "launcher, or the process that leads, has ended. The last checkpoint is good")
            raise AssertionError from error  # `end` has raised

    def lost(self, what: str, error: BaseException) -> None:
        """A transfer between the processes broke off. Raises RankError with the reason, as far as it can be found
        out within the time in which a process counts as lost."""
        def look() -> list[str]:
            self.look_for_failure()
            return []

        until = time.monotonic() + min(self.patience, LAST)
        while time.monotonic() < until:
            self.of_store(what, look)
            time.sleep(LONGEST)
        self.end(f"the connection between the ranks broke off at {what!r} ({error}): one of them has died, or its "
                 "machine cannot be reached. The last checkpoint is good; start all of them again to go on from it")

    def part(self) -> None:
        """After a meeting: whoever leads stays until all have read what was told, since the store may end with it."""
        key = f"parted/{self.number}"
        self.of_store("the end", lambda: [str(self.store.add(key, 1))])
        if self.rank == 0:
            self.stay(key, self.count)

    def stay(self, key: str, count: int) -> None:
        """Wait until so many have added to a key, but no longer than LAST."""
        until = time.monotonic() + LAST
        while time.monotonic() < until and self.store.add(key, 0) < count:
            time.sleep(LONGEST)

    def fail(self, error: BaseException) -> None:
        """Tell the others, unless it was they who told, that this process fails."""
        if isinstance(error, RankError) or self.broken is not None:
            return
        said = f"{type(error).__name__}: {error}"
        self.broken = RankError(f"rank {self.rank} has failed: {said}")
        try:
            self.store.set_timeout(timedelta(seconds=5))
            self.store.set(FAILED, str(self.broken))
            if self.rank == 0:
                self.stay(HEARD, self.count - 1)
        except Exception:  # noqa: BLE001 - the error that is on its way is the one to show
            return

    def end(self, message: str) -> None:
        """Break this meeting off, for good."""
        self.broken = RankError(message)
        raise self.broken
