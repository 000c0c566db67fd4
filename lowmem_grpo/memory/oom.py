"""Recover when memory runs out: recognise the error, free the attempt's tensors, make batches smaller for the rest of
the run, and show the plan's table, its row that was probably wrong, and settings that would help."""

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

CARD_WORDS = ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
              "Triton Error [CUDA]: out of memory")  # at the beginning of a message
ANYWHERE = ("CUDA Error: out of memory",  # from vLLM's memory pool, with this spelling
            "DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory",
            "captures_underway.empty() INTERNAL ASSERT FAILED")  # torch frees none while a CUDA graph is recorded
ASKED = re.compile(r"[Tt]r(?:ied|y) to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
# Rows of a plan that do not depend on the batch: a shortage is no sign that they are wrong.
FIXED = ("weight", "tower", "embedding", "head", "adapter", "trained", "gradient", "optimizer", "context", "reserve")
OTHERS = ("Other programs hold about {} of this card, which the plan does not know: end them (nvidia-smi lists them), "
          "or leave them room with card_share or torch.cuda.set_per_process_memory_fraction")
UNNOTICED = 2**31  # bytes: this process's memory outside torch (driver, libraries, paged states) counts as others'
SHOWN = 3  # most settings in an advice
TRIM_EVERY = 0.1  # seconds, about the time to quantize a tensor
# Held to record a CUDA graph, and to train or empty torch's cache in another thread: torch frees none meanwhile.
RECORDING = threading.RLock()
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class MemoryExhaustedError(RuntimeError):
    """Memory ran out, and the batch cannot be made smaller without changing the training result."""


@dataclass(frozen=True)
class OutOfMemory:
    """An out-of-memory error without its traceback, whose frames would keep the attempt's tensors alive."""

    words: str  # the first line of the error message
    asked: int | None  # bytes of the failed allocation, if known
    peak: int  # peak bytes in use so far
    others: str = ""  # advice if other programs hold much of the card's memory


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed allocation on the card or the host, not any error that mentions memory."""
    if isinstance(error, MemoryExhaustedError):
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = str(error)
    return isinstance(error, RuntimeError) and (words.startswith(CARD_WORDS) or any(w in words for w in ANYWHERE))


def catch_oom(work: Callable[[], T], device: torch.device, undo: Callable[[], None] | None = None) -> T | OutOfMemory:
    """Return the result of `work`. If memory runs out, call `undo`, free memory and return an `OutOfMemory`."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        shortage = shortage_of(error, device)
    if undo is not None:  # outside the handler, where the error would still hold the attempt's frames
        undo()
    free(device)
    return shortage


def shortage_of(error: BaseException, device: torch.device) -> OutOfMemory:
    """Return an out-of-memory error as `OutOfMemory`."""
    words = str(error)
    asked = ASKED.search(words)
    wanted = None if asked is None else int(float(asked[1]) * UNITS[asked[2]])
    first = words.splitlines()[0] if words else type(error).__name__
    others = 0  # bytes of the card that are neither unused nor this process's torch
    if device.type == "cuda":
        unused, total = torch.cuda.mem_get_info(device)
        others = total - unused - torch.cuda.memory_reserved(device)
    advice = OTHERS.format(size_text(others)) if others > UNNOTICED else ""
    return OutOfMemory(first, wanted, peak_memory(device).get("memory/peak_bytes", 0), advice)


def free(device: torch.device) -> None:
    """Free unused memory, once no other thread records a CUDA graph or trains."""
    gc.collect()
    if device.type == "cuda":
        with RECORDING:
            torch.cuda.empty_cache()


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Return freed pages to the system during and after this context; glibc would keep those freed by quantizing."""
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
    """Return `limit` halved, at least once, until below the largest size in `divisible`; None if all sizes are 0."""
    largest = max(divisible, default=0)
    limit //= 2
    while limit >= largest > 0:
        limit //= 2
    return limit if largest else None


@dataclass
class MemoryAdvice:
    """The advice shown when memory runs out. `settings` lists the helpful settings of each phase, best first."""

    settings: dict[str, list[str]] = field(default_factory=dict)
    plan: MemoryPlan | None = None

    def text(self, phase: str) -> str:
        """Return the plan's rows of a phase as a table, largest first, and the settings that would help most."""
        settings = self.settings.get(phase, [])[:SHOWN]
        helpful = "What would help: " + "; ".join(settings or ["a shorter context", "a smaller model"])
        if self.plan is None:
            return helpful
        rows = sorted(((row.name, getattr(row, phase)) for row in self.plan.rows), key=lambda row: -row[1])
        rows.append(("together", sum(size for _, size in rows)))
        width = max(len(name) for name, _ in rows)
        table = "\n".join(f"  {name:<{width}}  {size_text(size):>12}" for name, size in rows if size)
        return f"Planned:\n{table}\n{helpful}" if table else helpful

    def wrong_row(self, phase: str, what: str, peak: int) -> str:
        """Return a message with the planned and the measured bytes and the plan's row to blame, or "" without a plan.
        It is the row that a word of `what` names, or else the largest that grows with the batch."""
        if self.plan is None or not self.plan.rows:
            return ""
        rows = self.plan.rows
        named = [row for row in rows if row.name.split()[0].lower() in what.split() and getattr(row, phase)]
        grows = [row for row in rows if not any(word in row.name.lower() for word in FIXED)]
        blamed = max(named or grows or rows, key=attrgetter(phase))
        planned = sum(getattr(row, phase) for row in rows)
        return (f"The plan has {size_text(planned)} in this phase and {size_text(peak)} were measured; its row that is "
                f"most likely wrong: {blamed.name} ({size_text(getattr(blamed, phase))})")


@dataclass
class BatchLimit:
    """The largest batch allowed in a phase, and how often memory ran out in it."""

    phase: str  # "train" or "rollout"
    unit: str  # the unit of the bound, in words
    lowered: int | None = None  # the bound after memory ran out; None while it never has
    failures: int = 0
    advice: MemoryAdvice = field(default_factory=MemoryAdvice)
    planned: int | None = None  # the plan's bound, used if the user gave none
    spare: Callable[[], None] | None = None  # frees memory that another phase keeps
    spread: float | None = None  # the plan's limit of padded tokens in attention, as a multiple of the bound

    def under(self, asked: int | None) -> int | None:
        """Return the smaller of `asked` (None: the planned bound) and the lowered bound. None means no bound."""
        present = [value for value in (self.planned if asked is None else asked, self.lowered) if value is not None]
        return min(present, default=None)

    def lower(self, what: str, shortage: OutOfMemory, limit: int | None) -> None:
        """Count a shortage. If another phase keeps spare memory, free that memory; otherwise set the bound to `limit`,
        or raise MemoryExhaustedError if `limit` is None."""
        if self.spare is not None:
            self.spare()
            self.spare = None
            return self.note(what, shortage, "the memory that the sampler kept is freed, and the work is repeated")
        if limit is None:
            self.raise_exhausted(what, shortage)
        self.lowered = limit
        self.note(what, shortage, f"the bound on {self.unit} is now {limit:,}, and the work is repeated")

    def note(self, what: str, shortage: OutOfMemory, answer: str) -> None:
        """Count a shortage and log a warning; `answer` says what is done about it."""
        self.failures += 1
        bytes_asked = "" if shortage.asked is None else f" ({size_text(shortage.asked)} more could not be allocated)"
        wrong = shortage.others or self.advice.wrong_row(self.phase, what, shortage.peak)
        logger.warning("out of memory in %s%s: %s%s", what, bytes_asked, answer, wrong and f". {wrong}")

    def raise_exhausted(self, what: str, shortage: OutOfMemory) -> None:
        """Count a shortage and raise MemoryExhaustedError, with the memory table and the settings that would help."""
        self.failures += 1
        raise MemoryExhaustedError(
            f"out of memory in {what}, which cannot be made smaller: {shortage.words}\nMeasured peak: "
            f"{size_text(shortage.peak)}. {shortage.others and shortage.others + '. '}{self.advice.text(self.phase)}")

    def state(self) -> dict[str, int | None]:
        return {"lowered": self.lowered, "failures": self.failures}

    def restore(self, saved: dict[str, int | None]) -> None:
        """Restore the result of `state`. If the current bound is lower than the saved one, keep the current one."""
        self.lowered, self.failures = self.under(saved["lowered"]), int(saved["failures"] or 0)


@dataclass
class RolloutLimit(BatchLimit):
    """The bound on sequences sampled together, and the bytes of a KV cache that fitted into memory."""

    kv_bytes: int | None = None  # None while every requested cache could be allocated

    def cache_under(self, asked: int | None) -> int | None:
        """Return the smaller of `asked` and `kv_bytes`, the bytes of a KV cache; None counts as no limit."""
        return min((size for size in (asked, self.kv_bytes) if size is not None), default=None)

    def state(self) -> dict[str, int | None]:
        return super().state() | {"kv_bytes": self.kv_bytes}

    def restore(self, saved: dict[str, int | None]) -> None:
        super().restore(saved)
        self.kv_bytes = self.cache_under(saved.get("kv_bytes"))  # older checkpoints have none


class RunMemory:
    """A run's bounds on the batch, one for training and one for sampling. Checkpoints save them."""

    def __init__(self, advice: MemoryAdvice | None = None) -> None:
        self.advice = advice or MemoryAdvice()
        self.train = BatchLimit("train", "tokens in a micro-batch", advice=self.advice)
        self.rollout = RolloutLimit("rollout", "sequences sampled at once", advice=self.advice)

    def watch(self, engine: Any) -> None:
        """Replace the engine's `bound`, if it has one, by `self.rollout`, which gets the smaller KV cache of both
        bounds. The engine's is smaller if memory ran out when the engine started."""
        if hasattr(engine, "bound"):
            self.rollout.kv_bytes = engine.bound.cache_under(self.rollout.kv_bytes)
            engine.bound = self.rollout

    def metrics(self) -> dict[str, int]:
        return {"memory/oom_train": self.train.failures, "memory/oom_generate": self.rollout.failures}

    def state(self) -> dict[str, dict[str, int | None]]:
        return {bound.phase: bound.state() for bound in (self.train, self.rollout)}

    def restore(self, saved: dict[str, dict[str, int | None]] | None) -> None:
        """Restore the result of `state`; None, from an older checkpoint, changes nothing."""
        for bound in (self.train, self.rollout) if saved else ():
            bound.restore((saved or {})[bound.phase])
