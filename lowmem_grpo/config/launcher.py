"""This process's rank among a run's processes, and the number of CPU cores that other programs leave free."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from lowmem_grpo.utils import torch

logger = logging.getLogger(__name__)
T = TypeVar("T")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # not LOCAL_WORLD_SIZE, which vLLM overwrites
CARDS = "CUDA_VISIBLE_DEVICES"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
STAT = Path("/proc/stat")  # a line for each core, in hundredths of a second
BUSY = (1, 2, 3, 6, 7)  # its fields user, nice, system, interrupts; neither idle nor stolen time
LOOK = 0.25  # seconds for which a trainer looks what other programs compute


@dataclass(frozen=True)
class ProcessRank:
    """This process: its `rank` among `count` processes, and its number `local` on this machine."""

    rank: int = 0
    count: int = 1
    local: int = 0

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, count: int) -> range:
        """Return the consecutive indices of this process's part of `count` items. Part sizes differ by at most one."""
        return range(count * self.rank // self.count, count * (self.rank + 1) // self.count)


def this_process() -> ProcessRank:
    """Return this process's place from torchrun's environment variables; ValueError if they contradict each other."""
    variables = {name: os.environ[name] for name in NAMES if name in os.environ}
    if variables.get("WORLD_SIZE", "1") == "1":
        return ProcessRank()
    try:
        count = int(variables["WORLD_SIZE"])
        process = ProcessRank(int(variables["RANK"]), count, int(variables.get("LOCAL_RANK", variables["RANK"])))
    except (KeyError, ValueError):
        process = ProcessRank(-1)
    if not 0 <= process.rank < process.count or not 0 <= process.local <= process.rank:
        told = ", ".join(f"{name}={variables.get(name)!r}" for name in NAMES)
        raise ValueError(f"this process is to be one of several, and its variables do not fit together: {told}. Start "
                         "it with torchrun --nproc-per-node N, or unset them for a run in one process")
    return process


class ProcessArguments:
    """The fields of transformers' TrainingArguments about this process, for scripts and callbacks that read them."""

    use_cpu: bool
    log_level: str
    to_dict: Callable[[], dict[str, Any]]

    world_size = property(lambda self: this_process().count)
    process_index = property(lambda self: this_process().rank)
    local_process_index = property(lambda self: this_process().local)
    should_save = should_log = property(lambda self: this_process().leads)
    train_batch_size = property(attrgetter("per_device_train_batch_size"))
    eval_batch_size = property(attrgetter("per_device_eval_batch_size"))
    n_gpu = property(lambda self: int(self.device.type == "cuda"))

    @property
    def device(self) -> Any:
        """The device for a model that the trainer loads by name."""
        return torch.device(own_device(0 if self.use_cpu else torch.cuda.device_count()))

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        return {name: value if isinstance(value, bool | int | float | str) else str(value)
                for name, value in self.to_dict().items()}

    def get_process_log_level(self) -> int:
        return int(getattr(logging, self.log_level.upper(), logging.WARNING))  # "passive": transformers' own default

    def main_process_first(self, local: bool = True, desc: str = "work") -> Any:
        """Return a context that does nothing, for a single process; ValueError if there are several processes."""
        one_process("main_process_first")
        return nullcontext()


def one_process(what: str) -> None:
    """Raise ValueError, which says that `what` needs one process, if the run has several processes."""
    if (process := this_process()).count > 1:
        raise ValueError(f"{what} needs one process, and this is rank {process.rank} of {process.count}: start it "
                         "without torchrun")


def own_device(cards: int) -> str:
    return f"cuda:{this_process().local % cards}" if cards else "cpu"


def take_card() -> None:
    """Make only this process's card visible, if there are several processes. Call this before torch looks for cards.
    ValueError for fewer cards than processes."""
    process = this_process()
    if process.count == 1:
        return
    listed = [name for name in os.environ.get(CARDS, "").split(",") if name]
    if CARDS in os.environ and not listed:
        return  # the cards are hidden: the run is on the CPU
    if listed and process.local >= len(listed):
        raise ValueError(f"rank {process.rank} is process {process.local} of its machine, and has no card: {CARDS} "
                         f"lists {len(listed)} ({','.join(listed)}). Start at most one process for each card")
    os.environ[CARDS] = listed[process.local] if listed else str(process.local)


def used_by_others() -> tuple[float, float]:
    """Return (current time, CPU seconds that other programs have used on this process's cores so far)."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)} if STAT.is_file() else set[str]()
    lines = [line.split() for line in STAT.read_text().splitlines()] if cores else []
    ticks = sum(int(line[field]) for line in lines if line[0] in cores for field in BUSY)
    return time.monotonic(), ticks / 100 - time.process_time()


def leave_busy_cores(before: tuple[float, float]) -> None:
    """Use fewer threads if other programs kept cores busy since `before`, unless the user set OMP_NUM_THREADS."""
    if not gives_way():
        return
    seconds, computed = (now - then for now, then in zip(used_by_others(), before, strict=True))
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    if (free := max(1, cores - round(computed / seconds))) < threads:
        torch.set_num_threads(free)
        logger.warning("other programs keep %.1f of %d cores busy: this run computes with OMP_NUM_THREADS=%d, as more "
                       "threads would wait for each other; set it to %d to take all cores", computed / seconds, cores,
                       free, threads)


def gives_way() -> bool:
    return STAT.is_file() and not any(name in os.environ for name in THREADS) and not torch.cuda.is_available()


@contextmanager
def beside_others() -> Iterator[None]:
    """In this context, leave the cores to other programs that they keep busy at its start; see `leave_busy_cores`."""
    threads = torch.get_num_threads()
    if threads > 1 and gives_way():
        before = used_by_others()
        time.sleep(LOOK)
        leave_busy_cores(before)
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def balanced(things: Sequence[T], cost: Callable[[T], float], ranks: int) -> list[list[T]]:
    """Divide the things into one part per rank, each in the original order: the most expensive thing first, always to
    the rank with the lowest cost so far. So the largest part costs at most 4/3 of the optimum."""
    costs = [cost(thing) for thing in things]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for place in sorted(range(len(things)), key=lambda place: (-costs[place], place)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        parts[rank].append(place)
        loads[rank] += costs[place]
    return [[things[place] for place in sorted(part)] for part in parts]
