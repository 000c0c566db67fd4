"""Recovery of vLLM's memory pool when memory runs out, and a buffer of our own in the pool. Sleeping unmaps the pool,
and waking maps it again at the same addresses.

The pool (`csrc/cumem_allocator.cpp`) keeps the driver's last error in a variable. Unmapping an unmapped segment sets
that error, and later allocations then return nothing or leak. So after a shortage we leave the pool either wholly
mapped or wholly unmapped, and clear the error. If mapping a segment fails, its record remains and looks in use, so we
drop such records. `sleep(level=1)` copies segments tagged "weights" to the host and drops the rest, so a buffer under
our own tag costs no host memory.

torch keeps a cuBLAS workspace per stream. The workspace of a stream on which graphs were recorded lies in the graphs'
pool and outlives them, and torch then refuses to record another engine's graphs there ("use_count > 0 INTERNAL ASSERT
FAILED"). So an engine that ends drops the workspaces.

None of this is public, so only this file relies on it. We read the source of vLLM 0.26 to 0.33, and ran this file on an
H100 (vLLM 0.26, torch 2.11). tests/engines/vllm/test_pool.py fails if the pool changes.
"""

import ctypes
import logging
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.config.loading import FOUR
from lowmem_grpo.engines.token_step import forget_all_graphs
from lowmem_grpo.engines.vllm import sampling_weights as wide
from lowmem_grpo.engines.vllm.installed import EngineUnavailableError
from lowmem_grpo.engines.vllm.settings import Capacity
from lowmem_grpo.engines.vllm.shared_linear import BorrowError
from lowmem_grpo.models.policy import Policy

logger = logging.getLogger(__name__)

ALLOCATOR = "vllm.device_allocator.cumem"
CLEAR = "_cuda_clearCublasWorkspaces"  # in torch._C
EXTENSION = "vllm.cumem_allocator"  # a C extension, missing in CPU builds
TAG = "sampling_weights"  # marks segments whose contents sleep may drop
SEGMENT = 32 << 20  # bytes; torch gives 10 MiB or more a separate segment in steps of 2 MiB, so none is shared
ADVICE = 'Load the model with sampling_weights="4bit", or with enforce_eager=True, which needs no fixed addresses'
MISSING = ("cumem allocator is not", "Sleep mode is not supported", "CUDA Error: operation not supported",
           "one instance per process")  # the last: an ended engine still has memory in the pool


def is_missing(error: BaseException) -> bool:
    """Return True if vLLM did not start because its build or the driver has no pool, or the pool is still in use."""
    return any(words in str(error) for words in MISSING)


def unmap(llm: Any) -> None:
    """Unmap the segments that a failed `wake_up` has mapped, by calling sleep on vLLM's worker directly: its executor
    believes it is asleep. Older pools stop at the first unmapped segment, which comes after all mapped ones."""
    with suppress(Exception):
        llm.collective_rpc("sleep", kwargs={"level": 1})


def wake_if_room(llm: Any) -> bool:
    """Wake an engine that is about to end; returns False if memory has no room, and it stays asleep."""
    if not llm.llm_engine.is_sleeping():
        return True
    try:
        llm.wake_up()
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


def reset() -> None:
    """Drop the pools left by an ended engine or a failed start. Clears the pool's error before and after, as memory
    freed while an error is set leaks."""
    drop_workspaces()
    with suppress(ImportError):
        extension, held = import_module(EXTENSION), import_module(ALLOCATOR).CuMemAllocator.instance
        forget(extension)
        if held is not None:
            held.release_pools()
            drop_records_of_failures(held)
        forget(extension)


def drop_records_of_failures(allocator: Any) -> None:
    """Drop the pool's records of segments that torch does not hold: no engine starts while there is a record."""
    held = {segment["address"] for segment in torch.cuda.memory_snapshot()} if torch.cuda.is_available() else set()
    for address in allocator.pointer_to_data.keys() - held:
        del allocator.pointer_to_data[address]


def forget(extension: Any) -> None:
    """Clear the extension's stored error by a call that fails: unmapping 0 bytes. A driver that accepts that goes on to
    release the handle, so a null handle is passed."""
    handle = ctypes.c_ulonglong(0)
    with suppress(RuntimeError):
        extension.python_unmap_and_release(0, 0, 0, ctypes.addressof(handle))


def pool() -> Any:
    """Return vLLM's module with the pool."""
    return import_module(ALLOCATOR)


def why_not() -> str | None:
    """Return why a buffer of ours cannot be put into the pool here; None if it can. The pool of every version that
    `installed.py` allows was read."""
    return None if pool().cumem_available else "this build of vLLM has no memory pool that sleep can free"


class SleepingRoom:
    """A buffer in vLLM's pool that lives as long as the engine, allocated while vLLM loads the model."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None  # bytes

    def __call__(self, numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return (numbers,), always at the same address. BorrowError if the pool does not behave as we expect."""
        size = numbers * dtype.itemsize
        if self.buffer is None:
            self.buffer = made_in_pool(-(-size // SEGMENT) * SEGMENT, device)
        return self.buffer[:size].view(dtype)


def made_in_pool(size: int, device: torch.device) -> Tensor:
    """Return (size,) bytes in a separate pool segment under our tag, so that nothing of vLLM's is dropped with it."""
    if why := why_not():
        raise BorrowError(f"{why}. {ADVICE}")
    allocator = pool().CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag=TAG):
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
    segment = allocator.pointer_to_data.get(buffer.data_ptr())
    if segment is None or (segment.tag, segment.handle[1]) != (TAG, size):
        got = "none" if segment is None else f"{segment.handle[1]:,} bytes tagged {segment.tag!r}"
        raise BorrowError(f"vLLM's memory pool gave no segment of {size:,} bytes tagged {TAG!r}, but {got}. {ADVICE}")
    return buffer


def choose_for_engine(asked: str | None, policy: Policy, capacity: Capacity, eager: bool) -> tuple[str, int]:
    """Choose the weights' form as `sampling_weights.choose` does; with CUDA graphs (not `eager`) 16 bits also need
    vLLM's pool. EngineUnavailableError if the user `asked` for 16 bits and the pool cannot be used."""
    form, left = wide.choose(asked, policy, capacity.kv_budget, capacity.kv_given, capacity.wanted_seqs,
                             capacity.max_seq_length, capacity.cache_dtype)
    why = None if form == FOUR or eager else why_not()
    if why is None:
        return form, left
    if asked is not None:
        raise EngineUnavailableError(f'sampling_weights="16bit" cannot be had: {why}. Leave it out, or load with '
                                     "enforce_eager=True, which needs no fixed addresses")
    logger.warning("sampling with weights in 4 bits, though there is room for 16: %s", why)
    return FOUR, capacity.kv_budget
