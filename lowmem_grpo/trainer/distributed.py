"""The ranks (processes) of a run, over torch.distributed. Each rank has the whole model, and samples, scores and trains
a share of each step's rollouts. The process groups are made here because vLLM makes the default group for its own
process alone, and destroys it."""

import atexit
import json
import logging
import pickle
import platform
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from statistics import median
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from transformers import set_seed

from lowmem_grpo.config.launcher import ProcessRank, balanced, this_process

logger = logging.getLogger(__name__)
T = TypeVar("T")
START, FOREVER = timedelta(minutes=10), timedelta(days=365)  # limits to join, and of a transfer, which heartbeats end
CONNECT = timedelta(seconds=30)  # limit to connect to the other ranks
BEAT, PATIENCE = 1.0, 30.0  # seconds between two beats of a rank; seconds without one after which it is lost
LAST = 5.0  # the most seconds that the first rank waits at its exit, so that other ranks can read why the run failed
PAUSE, WIDTH, NAME = 0.001, 2048, 100  # seconds between two polls; bytes of `meet`'s message, characters of its name
LONGEST = 500  # the most characters of an error
SLOW, STEPS = 1.5, 3  # a rank is slow if it takes SLOW times the other ranks' median, for STEPS steps in a row
GOOD = "The last checkpoint is good; start all of them again to go on from it"


class RankError(RuntimeError):
    """Another rank failed, cannot be reached, or called a different collective operation."""


class Heartbeat:
    """A thread that writes this rank's heartbeat to torch's store and reads the other ranks' heartbeats. A rank without
    a heartbeat for `patience` seconds is lost; a rank that is only slow is waited for. Only this thread calls the
    store, as calls never return if the process that holds the store was stopped."""

    def __init__(self, store: Any, process: ProcessRank, beat: float = BEAT, patience: float = PATIENCE) -> None:
        self.store, self.process, self.beat, self.patience = store, process, beat, patience
        self.answered = time.monotonic()  # when the store last answered
        self.seen = [(0, self.answered)] * process.count  # each rank's beats, and since when
        self.broken, self.ended = "", threading.Event()  # why the run ends; set when this rank closes
        self.thread = threading.Thread(target=self.run, name="heartbeat", daemon=True)
        self.thread.start()
        atexit.register(self.close)  # a thread inside torch at interpreter exit would abort the process

    def close(self, limit: float | None = None) -> None:
        """Stop the thread, and wait for its end for at most `limit` seconds (None: `patience` seconds)."""
        self.ended.set()
        self.thread.join(limit or self.patience)

    def run(self) -> None:
        """Write heartbeats until `close` is called or a rank fails. After a failure, write its reason to the store."""
        with suppress(RuntimeError):  # the store has ended, with the process that holds it
            while not self.ended.wait(self.beat) and not self.broken:
                self.exchange()
            if self.broken:
                self.store.set("broken", json.dumps(self.broken))
            left, until = self.store.add("left", 1), time.monotonic() + LAST
            # the leading rank may hold the store
            while self.process.leads and left < self.process.count and time.monotonic() < until:
                time.sleep(PAUSE)
                left = self.store.add("left", 0)

    def exchange(self) -> None:
        """Write this rank's heartbeat, and read all ranks' heartbeats and the reason of a failure."""
        beats = [self.store.add(f"beat/{rank}", int(rank == self.process.rank)) for rank in range(self.process.count)]
        now = time.monotonic()
        self.seen = [old if old[0] == beat else (beat, now) for old, beat in zip(self.seen, beats, strict=True)]
        told = json.loads(self.store.get("broken")) if self.store.check(["broken"]) else ""
        lost = [self.missing(rank) for rank, (_, since) in enumerate(self.seen) if now - since > self.patience]
        self.broken = self.broken or told or (lost[0] if lost else "")
        self.answered = now

    def missing(self, rank: int) -> str:
        return (f"rank {rank} is lost: no sign of life for {self.patience:.0f} s while rank {self.process.rank} waits "
                f"for it. Its process was killed or hangs, or its machine cannot be reached. {GOOD}")

    def check(self, began: float) -> None:
        """Raise RankError if a rank failed or is lost, or if the store has been silent too long since time `began`."""
        if not self.broken and time.monotonic() - max(began, self.answered) > self.patience + self.beat:
            self.broken = self.missing(0)
        if self.broken or self.ended.is_set():
            raise RankError(self.broken or "the ranks have parted already")

    def fail(self, error: BaseException) -> None:
        """Report `error` to the other ranks, unless another rank caused it."""
        if not isinstance(error, RankError) and not self.broken:
            self.broken = f"rank {self.process.rank} has failed: {type(error).__name__}: {error}"[:LONGEST]
            self.close(2 * LAST)


class Ranks:
    """The collective operations of a run. RankError if the ranks do not call the same operations in the same order."""

    def __init__(self, process: ProcessRank | None = None, store: Any = None, **pace: float) -> None:
        """`store` is a store of torch.distributed; `pace` has the arguments `beat` and `patience` of `Heartbeat`."""
        self.process = process or ProcessRank()
        self.rank, self.count, self.leads, self.here = self.process.rank, self.process.count, self.process.leads, 1
        self.slow: dict[int, int] = {}  # steps in a row in which a rank was slow
        self.waited = 0.0  # seconds spent waiting for other ranks, since the last step's metrics
        self.store: Any = store
        self.card_group: Any = None  # sums gradients
        if self.count > 1:
            self.heartbeat = Heartbeat(store, self.process, **pace)
            self.group: Any = dist.ProcessGroupGloo(dist.PrefixStore("data", store), self.rank, self.count, CONNECT)
            self.group.set_timeout(FOREVER)
            machines = self.gather("the start", platform.node())
            self.here = machines.count(machines[self.rank])

    def mine(self, things: Sequence[T], cost: Callable[[T], float]) -> list[T]:
        """Return this rank's share of `things`, which are the same in all ranks; the shares have similar costs."""
        return list(things) if self.count == 1 else balanced(things, cost, self.count)[self.rank]

    def gather(self, what: str, own: T) -> list[T]:
        """Return each rank's value `own` (pickled), in rank order. Error messages name the operation `what`."""
        if self.count == 1:
            return [own]
        data = pickle.dumps(own)
        parts = self.exchange(what, data, max(self.meet(what, len(data))))
        return [own if rank == self.rank else pickle.loads(part)  # noqa: S301 - our own pickle; it ignores the padding
                for rank, part in enumerate(parts)]

    def first(self, what: str, make: Callable[[], T]) -> T:
        """Call `make` in the first process only, and return its result in all processes."""
        return self.gather(what, make() if self.leads else None)[0]  # type: ignore[return-value] # it made one

    def meet(self, what: str, size: int = 0) -> list[int]:
        """Wait until all ranks have reached the operation `what`, and return each rank's `size`."""
        if self.count == 1:
            return [size]
        began, what = time.monotonic(), what[:NAME]
        words = self.exchange(what, json.dumps([what, size]).encode(), WIDTH)
        self.waited += time.monotonic() - began
        told = [json.loads(word.rstrip(b"\0")) for word in words]
        for rank, (name, _) in enumerate(told):
            if name != what:
                self.heartbeat.broken = (
                    f"rank {rank} has come to {name!r}, and rank {self.rank} to {what!r}: their programs do not do the "
                    "same; run one program with one set of settings in all of them")
                self.heartbeat.check(began)
        return [size for _, size in told]

    def exchange(self, what: str, data: bytes, size: int) -> list[bytes]:
        """Return the data of each process, padded to `size` bytes."""
        sent = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        held = [torch.empty_like(sent) for _ in range(self.count)]
        self.finish(what, self.group.allgather([held], [sent]))
        return [part.numpy().tobytes() for part in held]

    def finish(self, what: str, work: Any) -> None:
        """Wait for the transfer `work`. RankError if the transfer breaks off, with the reason if it is known."""
        began = time.monotonic()
        try:
            while not work.is_completed():
                self.heartbeat.check(began)
                time.sleep(PAUSE)
            work.wait()
        except RuntimeError as error:
            for group in {self.group, self.card_group or self.group}:
                group.abort()  # else the process would wait for this transfer when it exits
            if isinstance(error, RankError):
                raise
            began = time.monotonic()
            while time.monotonic() - began < self.heartbeat.patience + 3 * self.heartbeat.beat:
                self.heartbeat.check(began)
                time.sleep(PAUSE)
            raise RankError(f"the connection between the ranks broke off at {what!r} ({error}): one of them has died, "
                            f"or cannot be reached. {GOOD}") from error

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each gradient by its sum over all processes, computed in fp32, or in fp64 if any parameter is fp64.
        A parameter that has a gradient in one process has a gradient in all processes afterwards."""
        if self.count == 1:
            return
        device = self.choose_group(parameters[0].device)
        sizes = [parameter.numel() for parameter in parameters]
        totals = self.meet("the gradients", sum(sizes))
        if len(set(totals)) > 1:
            raise RankError(f"the ranks train different numbers of parameters: {', '.join(map(str, totals))}; "
                            "give LoRA the same rank and the same modules in all of them")
        dtype = torch.float64 if any(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32
        flat = torch.zeros(totals[0] + len(sizes), dtype=dtype, device=device)  # at the end: which have a gradient
        *views, counts = flat.split([*sizes, len(sizes)])
        for place, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
            if parameter.grad is not None:
                view.copy_(parameter.grad.flatten())
                counts[place] = 1
        self.finish("the gradients", self.card_group.allreduce([flat]))
        for parameter, view, count in zip(parameters, views, counts.tolist(), strict=True):
            if count:
                parameter.grad = torch.empty_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad.copy_(view.view_as(parameter))

    def choose_group(self, device: torch.device) -> torch.device:
        """Return the device that sums gradients. The first call takes NCCL if each rank has its own GPU, else Gloo."""
        if self.card_group is None:
            cards = self.gather("their cards", card_of(device))
            self.card_group = self.group
            if dist.is_nccl_available() and None not in cards and len(set(cards)) == self.count:
                self.card_group = dist.ProcessGroupNCCL(
                    dist.PrefixStore("cards", self.store), self.rank, self.count, dist.ProcessGroupNCCL.Options())
                self.card_group.set_timeout(FOREVER)
        return torch.device("cpu") if self.card_group is self.group else device

    def metrics(self, step_time: float, own: dict[str, float]) -> dict[str, float]:
        """Return each rank's `own` metrics and its waiting and busy seconds in this step, named ranks/RANK/NAME."""
        if self.count == 1:
            return {}
        waited, self.waited = self.waited, 0.0
        told = self.gather("how a step went", own | {"waiting_s": waited, "busy_s": max(step_time - waited, 0.0)})
        self.warn_of_slow([measured["busy_s"] for measured in told])
        return {f"ranks/{rank}/{name}": value for rank, part in enumerate(told) for name, value in part.items()}

    def warn_of_slow(self, busy: list[float]) -> None:
        """Warn once of each rank that is slower than the others for STEPS steps in a row."""
        for rank, seconds in enumerate(busy):
            others = median(busy[:rank] + busy[rank + 1 :])
            steps = self.slow.get(rank, 0)
            self.slow[rank] = steps + 1 if seconds > SLOW * others > 0 or steps >= STEPS else 0
            if self.slow[rank] == STEPS:
                logger.warning(
                    "rank %d takes %.1f times as long as the others, which wait for it in each step: its card or its "
                    "machine is slower, or busy with something else. All ranks get as many prompts, and train as many "
                    "tokens; with cards of one kind none waits", rank, seconds / others)

    def seed(self, seed: int, step: int) -> None:
        """Seed this process from seed, step and rank, so that checkpoints need not store every rank's random state."""
        if self.count > 1:
            set_seed(random.Random(f"{seed}-{step}-{self.rank}").getrandbits(31))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Report an error raised in this context to the other processes, so that the run ends in all of them."""
        try:
            yield
        except BaseException as error:
            if self.count > 1:
                self.heartbeat.fail(error)
            raise


def ranks() -> Ranks:
    """Return the run's ranks. The first call waits for all ranks; RankError or ValueError if they cannot be joined."""
    return joined(this_process())


@cache
def joined(process: ProcessRank) -> Ranks:
    """Wait until all processes of this launch have joined, and return the ranks. RankError if some do not join."""
    if process.count == 1:
        return Ranks(process)
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=START))
        store.set_timeout(START)
        store = part_of_start(store, process.rank, process.count, START)
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise RankError(f"rank {process.rank} of {process.count} did not find the others: {error}. Start all of them "
                        "with one torchrun, or with the same MASTER_ADDR and MASTER_PORT") from error
    return Ranks(process, store)


def part_of_start(store: Any, rank: int, count: int, timeout: timedelta) -> Any:
    """Return a part of the store that only this start of the ranks uses: a launcher that restarts them may keep the
    store, with old keys. Its prefix is made of a random name from each rank, since torchrun's restart counts differ
    from machine to machine. TimeoutError, with the missing ranks, if some do not join in time."""
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
        time.sleep(10 * PAUSE)


def card_of(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
