"""`Ranks`: what the processes of a run do together. In one process each of it is what a process does by itself."""

import pickle
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from lowmem_grpo.parallel.attempt import own_part
from lowmem_grpo.parallel.meeting import Meeting, RankError
from lowmem_grpo.parallel.paces import Paces
from lowmem_grpo.parallel.place import Place, this_place
from lowmem_grpo.parallel.shares import balanced, share

T = TypeVar("T")
TRANSFER = timedelta(minutes=10)  # that moving bytes may take once all are there; a dead process is noticed at once
START = timedelta(minutes=10)  # until all processes have started


class Ranks:
    """One process."""

    def __init__(self, place: Place | None = None) -> None:
        self.place = place or Place()

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def count(self) -> int:
        return self.place.count

    @property
    def leads(self) -> bool:
        """Whether this process writes and shows what the run does."""
        return self.place.leads

    @property
    def here(self) -> int:
        """How many of the processes are on this machine."""
        return 1

    # What each one takes of a whole

    def share(self, count: int) -> range:
        """Which of `count` things, in their order, are this process's: neighbours."""
        return share(count, self.rank, self.count)

    def mine(self, things: Sequence[T], cost: Callable[[T], float]) -> list[T]:
        """This process's part of things that all processes have, in their order; all parts cost about the same."""
        return list(things) if self.count == 1 else balanced(things, cost, self.count)[self.rank]

    # What they tell each other

    def gather(self, what: str, own: T) -> list[T]:
        """What each process has, in the order of the ranks. `what` names it in messages."""
        return [own]

    def first(self, what: str, make: Callable[[], T]) -> T:
        """What the first process makes, in all of them."""
        return make()

    def meet(self, what: str) -> None:
        """Wait until all processes are here. Any of them may end afterwards."""

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each gradient by the sum of all processes' gradients."""

    def metrics(self, step_time: float, own: dict[str, float]) -> dict[str, float]:
        """Of a step of so many seconds, what each process measured and how long it waited for others, as metrics
        ranks/RANK/NAME. Nothing in one process."""
        return {}

    # What belongs to the run as a whole

    def seed(self, seed: int, step: int) -> None:
        """Give each process random states of its own for a step. One process goes on with those that it has."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, an error of one process ends the run in all of them."""
        yield


class Several(Ranks):
    """One of several processes. All of them have to ask for the same things in the same order; what differs is
    noticed, and said.

    Objects and gradients travel over Gloo, in a group of our own: a process's vLLM makes the default one, of itself
    only. Gradients are summed on the host, so that two processes may even share a card, and a sum takes no memory of
    it. The sum has the same bits in all of them.
    """

    def __init__(self, place: Place, store: Any, **patience: float) -> None:
        """`store` is torch's, which all processes reach; `patience` as `Meeting` has it."""
        super().__init__(place)
        self.store = torch.distributed.PrefixStore("machine", store)
        self.store.set(str(place.rank), platform.node())
        self.meeting = Meeting(torch.distributed.PrefixStore("meeting", store), place.rank, place.count, **patience)
        self.meeting.meet("the start")  # so that only a process that dies just now is waited for in vain
        self.group: Any = torch.distributed.ProcessGroupGloo(torch.distributed.PrefixStore("gloo", store), place.rank,
                                                             place.count, timedelta(seconds=self.meeting.patience))
        self.buffer = torch.empty(0)  # of the gradients, on the host
        self.paces = Paces()

    @cached_property
    def here(self) -> int:
        names = self.store.multi_get([str(rank) for rank in range(self.count)])
        return sum(name == names[self.rank] for name in names)

    def gather(self, what: str, own: T) -> list[T]:
        """Whatever can be pickled."""
        if self.meeting.broken is not None:
            raise self.meeting.broken
        data = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        sizes = [int(size) for size in self.meeting.meet(what, str(len(data)))]
        sent = torch.zeros(max(sizes), dtype=torch.uint8)
        sent[: len(data)] = data
        found = [torch.empty_like(sent) for _ in sizes]
        self.moved(what, lambda: self.group.allgather([found], [sent], patient(AllgatherOptions())))
        return [own if rank == self.rank else pickle.loads(one[:size].numpy().tobytes())  # noqa: S301 - our own
                for rank, (one, size) in enumerate(zip(found, sizes, strict=True))]

    def first(self, what: str, make: Callable[[], T]) -> T:
        made = self.gather(what, make() if self.leads else None)[0]
        return made  # type: ignore[return-value] # the first one made it

    def meet(self, what: str) -> None:
        self.meeting.meet(what)
        self.meeting.part()

    def moved(self, what: str, begin: Callable[[], Any]) -> None:
        """Move bytes between the processes; RankError where that breaks off."""
        try:
            begin().wait()
        except RuntimeError as error:
            self.meeting.lost(what, error)

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """A parameter that has a gradient in one process has one in all of them afterwards. The sum is in fp32, or in
        fp64 where a gradient is."""
        wide = any(p.grad is not None and p.grad.dtype == torch.float64 for p in parameters)
        total, there = sum(p.numel() for p in parameters), len(parameters)
        kind = self.meeting.meet("the gradients", f"{total} {wide}")
        if len({one.partition(" ")[0] for one in kind}) > 1:
            self.meeting.end(f"the ranks train different numbers of parameters: {', '.join(kind)}; give LoRA the same "
                             "rank and the same modules in all of them")
        flat = self.flat(total + there, torch.float64 if any("True" in one for one in kind) else torch.float32)
        views = flat[: total].split([p.numel() for p in parameters])
        for place, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
            flat[total + place] = float(parameter.grad is not None)
            view.zero_() if parameter.grad is None else view.view(parameter.shape).copy_(parameter.grad)
        self.moved("the gradients", lambda: self.group.allreduce([flat], patient(AllreduceOptions())))
        for place, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
            if not flat[total + place]:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(view.view(parameter.shape))

    def flat(self, size: int, dtype: torch.dtype) -> Tensor:
        """The host's buffer, which is made once."""
        if (len(self.buffer), self.buffer.dtype) != (size, dtype):
            self.buffer = torch.empty(size, dtype=dtype)
        return self.buffer

    def metrics(self, step_time: float, own: dict[str, float]) -> dict[str, float]:
        waited, self.meeting.waited = self.meeting.waited, 0.0
        told = own | {"waiting_s": waited, "busy_s": max(step_time - waited, 0.0)}
        return self.paces.metrics(self.gather("how a step went", told))

    def seed(self, seed: int, step: int) -> None:
        """They follow from the seed of the run, the step and the rank, so that a checkpoint need not hold them."""
        own = random.Random(f"{seed}-{step}-{self.rank}").getrandbits(31)
        random.seed(own)
        np.random.seed(own)
        torch.manual_seed(own)

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.meeting.fail(error)
            raise


JOINED: dict[Place, Ranks] = {}  # a process joins once


def ranks(**patience: float) -> Ranks:
    """The processes of this run. The first call joins them, with the `patience` of `Meeting`; ValueError or RankError
    where that fails."""
    place = this_place()
    if place not in JOINED:
        JOINED[place] = Ranks(place) if place.count == 1 else join(place, **patience)
    return JOINED[place]


def patient(options: Any) -> Any:
    """The options of a transfer, which may take as long as many bytes take."""
    options.timeout = TRANSFER
    return options


def join(place: Place, **patience: float) -> Several:
    """Find the other processes at the address that the launcher gave."""
    try:
        store, _, _ = next(torch.distributed.rendezvous("env://", timeout=START))
        store.set_timeout(START)
        return Several(place, own_part(store, place.rank, place.count, START), **patience)
    except RankError:
        raise
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise RankError(f"rank {place.rank} of {place.count} did not find the others: {error}. Start all of them with "
                        "one torchrun, or with the same MASTER_ADDR and MASTER_PORT") from error
