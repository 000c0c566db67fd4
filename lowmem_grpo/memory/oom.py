"""What happens when memory runs out: the error is recognised, what it held is freed, less is done at once, and the user
is told of the plan's table, its row that was probably wrong, and settings that would help. `catch_oom` makes an attempt
and returns an `OutOfMemory` instead of raising the error; each lowers a `BatchLimit` for the rest of the run.
"""

import ctypes
import gc
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar

import torch

from lowmem_grpo.memory.peaks import peak_memory
from lowmem_grpo.memory.plan import MemoryPlan
from lowmem_grpo.utils import size_text

logger = logging.getLogger(__name__)

T = TypeVar("T")

CPU_WORDS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
CARD_WORDS = ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
              "Triton Error [CUDA]: out of memory")
POOL_WORDS = "CUDA Error: out of memory"  # vLLM's memory pool, which spells it so, wherever the words stand
ASKED = re.compile(r"[Tt]r(?:ied|y) to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
# Rows of a plan that do not depend on how much is done at once: a shortage does not show that they are wrong.
FIXED = ("weight", "embedding", "head", "adapter", "gradient", "optimizer", "context", "reserve")
OTHERS = ("Other programs hold about {} of this card, which the plan does not know: end them (nvidia-smi lists them), "
          "or leave them room with card_share or torch.cuda.set_per_process_memory_fraction")
UNNOTICED = 2**31  # bytes: what this process holds without torch (driver, libraries, paged states) counts as others'
SHOWN = 3  # settings
TRIM_EVERY = 0.1  # seconds: about the time in which a tensor is quantized
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class MemoryExhaustedError(RuntimeError):
    """Memory ran out, and nothing can be made smaller without changing what is trained."""


@dataclass(frozen=True)
class OutOfMemory:
    """An out-of-memory error without its traceback, whose frames would keep the attempt's tensors alive."""

    words: str  # the first line of the error's own
    asked: int | None  # bytes that could not be had
    peak: int  # bytes in use at most, so far
    others: str = ""  # what other programs hold of the card, where that is much, and what to do


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on the card or on the host. Other errors may mention memory too."""
    if isinstance(error, MemoryExhaustedError):
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = str(error)
    anywhere = (POOL_WORDS, *CPU_WORDS)
    return isinstance(error, RuntimeError) and (words.startswith(CARD_WORDS) or any(w in words for w in anywhere))


def catch_oom(work: Callable[[], T], device: torch.device, undo: Callable[[], None] | None = None) -> T | OutOfMemory:
    """Return the result of `work`; or the shortage if memory ran out, after `undo` and with the memory freed."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        shortage = shortage_of(error, device)
    if undo is not None:  # not in the handler, where the error still holds the frames of the attempt
        undo()
    free(device)
    return shortage


def shortage_of(error: BaseException, device: torch.device) -> OutOfMemory:
    """Return the bytes that an out-of-memory error names; the number asked for is None where its words do not tell."""
    words = str(error)
    asked = ASKED.search(words)
    wanted = None if asked is None else int(float(asked[1]) * UNITS[asked[2]])
    first = words.splitlines()[0] if words else type(error).__name__
    return OutOfMemory(first, wanted, peak_memory(device)["memory/peak_bytes"], held_by_others(device))


def held_by_others(device: torch.device) -> str:
    """Return in words what of a card is neither free nor torch's here; empty where it is what a driver takes."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return OTHERS.format(size_text(others)) if others > UNNOTICED else ""


def free(device: torch.device) -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Inside and at the end, freed pages go back to the system (glibc keeps them after quantizing on the CPU)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    done = threading.Event()

    def work() -> None:
        while trim is not None and not done.wait(TRIM_EVERY):
            trim(0)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if trim is not None:
            trim(0)


def smaller(limit: int, divisible: Iterable[int]) -> int | None:
    """`limit` halved, until it splits the largest of what is `divisible` (sizes); None where nothing is."""
    largest = max(divisible, default=0)
    if not largest:
        return None
    limit //= 2
    while limit >= largest:
        limit //= 2
    return limit


@dataclass
class MemoryAdvice:
    """`settings` lists for each phase what would help, the best first; `plan` may be set later."""

    settings: dict[str, list[str]] = field(default_factory=dict)
    plan: MemoryPlan | None = None

    def text(self, phase: str) -> str:
        """Return the plan of a phase as a table, and the settings that would help most."""
        settings = self.settings.get(phase, [])[:SHOWN]
        helpful = "What would help: " + "; ".join(settings or ["a shorter context", "a smaller model"])
        table = self.table(phase)
        return f"Planned:\n{table}\n{helpful}" if table else helpful

    def table(self, phase: str) -> str:
        """Return the plan's rows of a phase, largest first; empty without a plan."""
        if self.plan is None:
            return ""
        rows = sorted(((row.name, getattr(row, phase)) for row in self.plan.rows), key=lambda row: -row[1])
        rows.append(("together", sum(size for _, size in rows)))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {size_text(size):>12}" for name, size in rows if size)

    def wrong_row(self, phase: str, what: str, peak: int) -> str:
        """Planned and measured bytes, and the row to blame: named like what failed, or the largest that grows."""
        if self.plan is None or not self.plan.rows:
            return ""
        rows = self.plan.rows
        named = [row for row in rows if row.name.split()[0].lower() in what.split() and getattr(row, phase)]
        grows = [row for row in rows if not any(word in row.name.lower() for word in FIXED)]
        blamed = max(named or grows or rows, key=attrgetter(phase))
        planned = sum(getattr(row, phase) for row in rows)
        return (
            f"The plan has {size_text(planned)} in this phase and {size_text(peak)} were measured; its row that is "
            f"most likely wrong: {blamed.name} ({size_text(getattr(blamed, phase))})"
        )


@dataclass
class BatchLimit:
    """The largest amount done at once in a phase, and how often memory ran out in it."""

    phase: str  # "train" or "rollout"
    unit: str  # what is counted
    lowered: int | None = None  # None while memory has never run out
    failures: int = 0
    advice: MemoryAdvice = field(default_factory=MemoryAdvice)
    planned: int | None = None  # what holds where the user gave no bound
    spare: Callable[[], None] | None = None  # gives back what another phase keeps
    spread: float | None = None  # planned with it: places side by side in attention, as a multiple of the bound

    def under(self, asked: int | None) -> int | None:
        """The bound that holds beside the one that is `asked` for; None is no bound."""
        present = [value for value in (self.planned if asked is None else asked, self.lowered) if value is not None]
        return min(present, default=None)

    def lower(self, what: str, shortage: OutOfMemory, limit: int | None) -> None:
        """Count a shortage and remember the new limit; MemoryExhaustedError for None. What is spare goes first."""
        if self.spare is not None:
            self.spare()
            self.spare = None
            return self.note(what, shortage, "what the sampler kept is given back, and the work is repeated")
        if limit is None:
            self.raise_exhausted(what, shortage)
        self.lowered = limit
        self.note(what, shortage, f"the bound on {self.unit} is now {limit:,}, and the work is repeated")

    def note(self, what: str, shortage: OutOfMemory, answer: str) -> None:
        """Count a shortage and warn of it, with what is done about it."""
        self.failures += 1
        bytes_asked = "" if shortage.asked is None else f" ({size_text(shortage.asked)} more could not be had)"
        wrong = shortage.others or self.advice.wrong_row(self.phase, what, shortage.peak)
        logger.warning("out of memory in %s%s: %s%s", what, bytes_asked, answer, wrong and f". {wrong}")

    def raise_exhausted(self, what: str, shortage: OutOfMemory) -> None:
        """Count a shortage and raise MemoryExhaustedError, with the memory table and the settings that would help."""
        self.failures += 1
        raise MemoryExhaustedError(
            f"out of memory in {what}, which cannot be made smaller: {shortage.words}\n"
            f"Measured peak: {size_text(shortage.peak)}. {shortage.others and shortage.others + '. '}"
            f"{self.advice.text(self.phase)}"
        )

    def state(self) -> dict[str, int | None]:
        """Return what a checkpoint keeps of the bound."""
        return {"lowered": self.lowered, "failures": self.failures}

    def restore(self, saved: dict[str, int | None]) -> None:
        """Restore `state`; a lower bound that is already set stays."""
        self.lowered, self.failures = self.under(saved["lowered"]), int(saved["failures"] or 0)


@dataclass
class RolloutLimit(BatchLimit):
    """The bound of sampling: also the bytes of a key-value cache that memory had room for."""

    kv_bytes: int | None = None  # None while all that was asked for could be had

    def cache_under(self, asked: int | None) -> int | None:
        """The bytes that hold beside those that are `asked` for; None where neither is a bound."""
        return min((size for size in (asked, self.kv_bytes) if size is not None), default=None)

    def state(self) -> dict[str, int | None]:
        return super().state() | {"kv_bytes": self.kv_bytes}

    def restore(self, saved: dict[str, int | None]) -> None:
        super().restore(saved)
        self.kv_bytes = self.cache_under(saved.get("kv_bytes"))  # older checkpoints have none


class RunMemory:
    """A run's two bounds, saved with it."""

    def __init__(self, advice: MemoryAdvice | None = None) -> None:
        self.advice = advice or MemoryAdvice()
        self.train = BatchLimit("train", "tokens in a micro-batch", advice=self.advice)
        self.rollout = RolloutLimit("rollout", "sequences sampled at once", advice=self.advice)

    def watch(self, engine: Any) -> None:
        """Give the bound to an engine that uses one, and keep what the engine learned when it started."""
        if hasattr(engine, "bound"):
            self.rollout.kv_bytes = engine.bound.cache_under(self.rollout.kv_bytes)
            engine.bound = self.rollout

    def metrics(self) -> dict[str, int]:
        return {"memory/oom_train": self.train.failures, "memory/oom_generate": self.rollout.failures}

    def state(self) -> dict[str, dict[str, int | None]]:
        return {bound.phase: bound.state() for bound in (self.train, self.rollout)}

    def restore(self, saved: dict[str, dict[str, int | None]] | None) -> None:
        """Restore `state`; an older checkpoint that has none changes nothing."""
        for bound in (self.train, self.rollout) if saved else ():
            bound.restore((saved or {})[bound.phase])
