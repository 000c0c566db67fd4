"""vLLM's memory pool where memory runs out in waking: all of it is mapped, or none, and its error is forgotten.

The pool (CUDA's virtual memory, `csrc/cumem_allocator.cpp`) keeps the driver's last error in a variable. Unmapping
what is not mapped sets it, and the allocations that follow give nothing, or leak. That is so in vLLM 0.26 to 0.32, as
read in the source; nothing of this file has run on a card. `reset` is the one place that uses what is not public of
vLLM; tests/test_vllm_pool.py fails where it moves.
"""

import logging
from contextlib import suppress
from importlib import import_module
from typing import Any

logger = logging.getLogger(__name__)

ALLOCATOR = "vllm.device_allocator.cumem"
EXTENSION = "vllm.cumem_allocator"  # in C; builds for CPUs have none


MISSING = ("cumem allocator is not", "Sleep mode is not supported", "CUDA Error: operation not supported")


def is_missing(error: BaseException) -> bool:
    """Whether vLLM did not start for want of its pool: a build without it, or a driver without virtual memory."""
    return any(words in str(error) for words in MISSING)


def unmap(llm: Any) -> None:
    """Put to sleep again what a `wake_up` that broke off has mapped: vLLM's worker falls asleep, though its executor
    believes that it sleeps already. Older pools stop at the first part that is not mapped, after those that are."""
    with suppress(Exception):
        llm.collective_rpc("sleep", kwargs={"level": 1})


def woken(llm: Any) -> bool:
    """Wake an engine that is to end, if memory has room for it; whether it is awake."""
    if not llm.llm_engine.is_sleeping():
        return True
    try:
        llm.wake_up()
    except Exception as error:  # noqa: BLE001 - whatever it is, the engine has to end
        logger.debug("vLLM's engine ends asleep (%s: %s)", type(error).__name__, error)
        unmap(llm)
        return False
    return True


def reset() -> None:
    """Drop the pools that an ended engine or a start that broke off has left, with the errors before and of doing so:
    memory that is given back while there is one is lost."""
    with suppress(ImportError):
        extension, held = import_module(EXTENSION), import_module(ALLOCATOR).CuMemAllocator.instance
        forget(extension)
        if held is not None:
            held.release_pools()
        forget(extension)


def forget(extension: Any) -> None:
    """Clear the extension's error: its own calls do so in raising it, and unmapping nothing is a call that fails before
    it touches anything."""
    with suppress(RuntimeError):
        extension.python_unmap_and_release(0, 0, 0, 0)
