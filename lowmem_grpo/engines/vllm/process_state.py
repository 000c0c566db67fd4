"""Process-wide state around vLLM: how its changes to the process are undone, the one engine that a process can have,
errors when vLLM starts, its memory pool after a shortage, and a buffer of our own in the pool.

When it starts, vLLM seeds every random generator, replaces sys.excepthook (through torch.distributed), and freezes all
objects against garbage collection. Importing it stores the errors of failed imports.

Sleeping unmaps vLLM's memory pool (`csrc/cumem_allocator.cpp`), and waking maps it again at the same addresses. The
pool keeps the driver's last error in a variable. Unmapping an unmapped segment sets that error, and later allocations
then return nothing or leak. So after a shortage we leave the pool either wholly mapped or wholly unmapped, and clear
the error. If mapping a segment fails, its record remains and looks in use, so we drop such records. `sleep(level=1)`
copies segments tagged "weights" to the host and drops the rest, so a buffer under our own tag costs no host memory.

vLLM's sleep and waking also give all of torch's cache back to the driver, which the next training phase asks for again.
So where the pool has `discard` (vLLM 0.32 and 0.33; not run on a card), we unmap and map the KV cache and our buffer
ourselves, and vLLM is not told. With other names, vLLM's own sleep serves.

torch keeps a cuBLAS workspace per stream. The workspace of a stream on which graphs were recorded lies in the graphs'
pool and outlives them, and torch then refuses to record another engine's graphs there ("use_count > 0 INTERNAL ASSERT
FAILED"). So an engine that ends drops the workspaces.

None of this is public, so only this file relies on it. We read the source of vLLM 0.26 to 0.33, and ran this file on an
H100 (vLLM 0.26, torch 2.11). tests/engines/vllm/test_pool.py fails if the pool changes.
"""

import ctypes
import gc
import logging
import random
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowmem_grpo.config.loading import EngineUnavailableError
from lowmem_grpo.engines.token_step import forget_all_graphs
from lowmem_grpo.engines.vllm.installed import import_plugin
from lowmem_grpo.engines.vllm.shared_linear import BorrowError
from lowmem_grpo.engines.vllm.weight_sharing import WeightSharing
from lowmem_grpo.models.policy import Policy

logger = logging.getLogger(__name__)
NOT_STARTED = "vLLM did not start"
ALLOCATOR = "vllm.device_allocator.cumem"
CLEAR = "_cuda_clearCublasWorkspaces"  # in torch._C
EXTENSION = "vllm.cumem_allocator"  # a C extension, missing in CPU builds
TAG = "sampling_weights"  # marks segments whose contents sleep may drop
DISCARDED = ("kv_cache", TAG)  # tags of what training has no use for
SEGMENT = 32 << 20  # bytes; torch gives 10 MiB or more a separate segment in steps of 2 MiB, so none is shared
ADVICE = 'Load the model with sampling_weights="4bit", or with enforce_eager=True, which needs no fixed addresses'
MISSING = ("cumem allocator is not", "Sleep mode is not supported", "CUDA Error: operation not supported",
           "one instance per process")  # the last: an ended engine still has memory in the pool


@contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Restore the random states of Python, numpy and torch (CPU and `device`) and sys.excepthook after this context."""
    states, hook = (random.getstate(), np.random.get_state()), sys.excepthook
    try:
        with torch_states_kept(device):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        sys.excepthook = hook


def torch_states_kept(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that restores torch's random states at its end; an engine step changes no others."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def import_from_a_thread() -> None:
    """Import vLLM in a thread with an empty stack. vLLM keeps the errors of failed imports, whose tracebacks would keep
    alive the local variables of all callers."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(import_plugin).result()


@contextmanager
def collectable() -> Iterator[None]:
    """After this context, undo vLLM's gc.freeze(), which keeps alive all objects that exist when vLLM starts."""
    frozen = gc.get_freeze_count()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


@dataclass
class Process:
    engine: "weakref.ref[Any] | None" = None  # the open VLLMEngine
    clean: bool = True  # False if vLLM's memory pool must be reset before another engine uses it


PROCESS = Process()


def living() -> Any:
    """Return the open vLLM engine of this process; None if there is none."""
    engine = None if PROCESS.engine is None else PROCESS.engine()
    return engine if engine is not None and engine.llm is not None else None


def check_alone() -> None:
    """Raise EngineUnavailableError if another vLLM engine is open."""
    if living() is not None:
        gc.collect()  # the open engine may be unreachable already
    if living() is not None:
        raise EngineUnavailableError("a vLLM engine lives in this process already; close() it first")


def end(llm: Any, loan: WeightSharing) -> None:
    """Shut vLLM down and stop sharing the trainer's tensors; also called when an engine is deleted without `close`. The
    pool fails if it unmaps a sleeping cache again, so the engine is woken first if memory has room."""
    loan.close()
    try:
        PROCESS.clean = wake_if_room(llm)
        llm.llm_engine.engine_core.shutdown()
    except Exception as error:  # noqa: BLE001 - a dead engine may raise anything, and is dropped in any case
        PROCESS.clean = False
        logger.warning("vLLM's engine did not end cleanly (%s: %s)", type(error).__name__, error)
    drop_workspaces()


def explain(error: BaseException, policy: Policy) -> None:
    """Add a note with the model and advice to the error of a failed start of vLLM; a BorrowError has both already."""
    if isinstance(error, Exception) and not isinstance(error, BorrowError):
        error.add_note(f"{NOT_STARTED} with {type(policy.base).__name__} and these settings. Change them, or "
                       'sample with fast_inference="transformers"')


def is_of_start(error: Exception) -> bool:
    """Return True if the error means that vLLM cannot be used or did not start (it then has `explain`'s note)."""
    noted = any(note.startswith(NOT_STARTED) for note in getattr(error, "__notes__", ()))
    return noted or isinstance(error, EngineUnavailableError | BorrowError)


# The memory pool


def is_pool_missing(error: BaseException) -> bool:
    """Return True if vLLM did not start because its build or the driver lacks a memory pool, or the pool is in use."""
    return any(words in str(error) for words in MISSING)


def discarding() -> Any:
    """Return vLLM's allocator if it can unmap some segments without emptying torch's cache; else None."""
    try:
        module = pool()
        found = module.CuMemAllocator.instance
        return found if found is None or (callable(found.discard) and callable(module.create_and_map)) else None
    except (ImportError, AttributeError):
        say_own_sleep()
        return None


@cache
def say_own_sleep() -> None:
    logger.info("vLLM's memory pool has no discard or create_and_map here (0.32 and 0.33 have both): its own sleep "
                "also gives torch's cache back, and training asks for it again")


def sleep(llm: Any) -> None:
    """Free the KV cache and our buffer; an older vLLM sleeps."""
    if (allocator := discarding()) is None:
        llm.sleep(level=1)
    else:
        allocator.discard(DISCARDED)


def wake(llm: Any) -> None:
    """Undo `sleep`."""
    if llm.llm_engine.is_sleeping() or (allocator := discarding()) is None:
        llm.wake_up()
        return
    for segment in allocator.pointer_to_data.values():
        if segment.is_asleep:
            pool().create_and_map(segment.handle)
            segment.is_asleep = False


def unmap(llm: Any) -> None:
    """Unmap the segments that a failed `wake` has mapped. `sleep` is called on vLLM's worker, because the executor
    takes the engine to be asleep. Older pools stop at the first unmapped segment, which comes after all mapped ones."""
    with suppress(Exception):
        if not llm.llm_engine.is_sleeping() and (allocator := discarding()) is not None:
            allocator.discard(DISCARDED)
        else:
            llm.collective_rpc("sleep", kwargs={"level": 1})


def wake_if_room(llm: Any) -> bool:
    """Wake an engine that is about to end. If memory has no room, leave it asleep and return False."""
    allocator = discarding()
    segments = [] if allocator is None else allocator.pointer_to_data.values()
    if not llm.llm_engine.is_sleeping() and not any(segment.is_asleep for segment in segments):
        return True
    try:
        wake(llm)
    except Exception as error:  # noqa: BLE001 - the engine has to end in any case
        logger.debug("vLLM's engine ends asleep (%s: %s)", type(error).__name__, error)
        unmap(llm)
        return False
    return True


def drop_workspaces() -> None:
    """Wait for the card, then drop torch's cuBLAS workspaces, and the transformers engines' graphs that read them. The
    next matrix product allocates a new workspace."""
    clear = getattr(torch._C, CLEAR, None)  # missing in CPU builds
    if clear is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        forget_all_graphs()
        clear()


def reset_pool() -> None:
    """Drop the pools of an engine that ended or failed to start. Also clear the stored error, which leaks memory."""
    drop_workspaces()
    with suppress(ImportError):
        extension, held = import_module(EXTENSION), import_module(ALLOCATOR).CuMemAllocator.instance
        clear_pool_error(extension)
        if held is not None:
            held.release_pools()
            drop_records_of_failures(held)
        clear_pool_error(extension)


def drop_records_of_failures(allocator: Any) -> None:
    """Drop the pool's records of segments that torch does not hold: no engine starts while there is a record."""
    held = {segment["address"] for segment in torch.cuda.memory_snapshot()} if torch.cuda.is_available() else set()
    for address in allocator.pointer_to_data.keys() - held:
        del allocator.pointer_to_data[address]


def clear_pool_error(extension: Any) -> None:
    """Clear the extension's stored error by unmapping 0 bytes, a call that fails. A driver that accepts 0 bytes would
    then release the handle, so a null handle is passed."""
    handle = ctypes.c_ulonglong(0)
    with suppress(RuntimeError):
        extension.python_unmap_and_release(0, 0, 0, ctypes.addressof(handle))


def pool() -> Any:
    """Return vLLM's module with the pool."""
    return import_module(ALLOCATOR)


def why_no_pool() -> str | None:
    """Return why the installed vLLM's memory pool cannot hold a buffer of ours; None if it can."""
    return None if pool().cumem_available else "this build of vLLM has no memory pool that sleep can free"


class SleepingRoom:
    """A buffer in vLLM's pool that lives as long as the engine, allocated while vLLM loads the model."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None  # bytes

    def __call__(self, numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor (numbers,), always at one address. BorrowError if the pool does not behave as we expect."""
        size = numbers * dtype.itemsize
        if self.buffer is None:
            self.buffer = made_in_pool(-(-size // SEGMENT) * SEGMENT, device)
        return self.buffer[:size].view(dtype)


def made_in_pool(size: int, device: torch.device) -> Tensor:
    """Return a buffer of `size` bytes in a segment of its own in vLLM's pool, under our tag. No data of vLLM shares the
    segment, so the buffer can be freed alone. BorrowError if the pool gave another segment."""
    if why := why_no_pool():
        raise BorrowError(f"{why}. {ADVICE}")
    allocator = pool().CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag=TAG):
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
    segment = allocator.pointer_to_data.get(buffer.data_ptr())
    if segment is None or (segment.tag, segment.handle[1]) != (TAG, size):
        got = "none" if segment is None else f"{segment.handle[1]:,} bytes tagged {segment.tag!r}"
        raise BorrowError(f"vLLM's memory pool gave no segment of {size:,} bytes tagged {TAG!r}, but {got}. {ADVICE}")
    return buffer
