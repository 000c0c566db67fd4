"""Process-wide state around vLLM: how its changes to the process are undone, the one engine that a process can have,
and errors when vLLM starts.

When it starts, vLLM seeds every random generator, replaces sys.excepthook (through torch.distributed), and freezes all
objects against garbage collection. Importing it stores the errors of failed imports.
"""

import gc
import logging
import random
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lowmem_grpo.engines.vllm import pool as vllm_pool
from lowmem_grpo.engines.vllm.installed import EngineUnavailableError, import_plugin
from lowmem_grpo.engines.vllm.shared_linear import BorrowError
from lowmem_grpo.engines.vllm.weight_sharing import WeightSharing
from lowmem_grpo.models.policy import Policy

logger = logging.getLogger(__name__)
NOT_STARTED = "vLLM did not start"


@contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Restore the random states of Python, numpy and torch (CPU and `device`), and sys.excepthook, on exit."""
    states, hook = (random.getstate(), np.random.get_state()), sys.excepthook
    try:
        with torch_states_kept(device):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        sys.excepthook = hook


def torch_states_kept(device: torch.device) -> AbstractContextManager[None]:
    """Restore torch's random states on exit; an engine step changes no others."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def import_from_a_thread() -> None:
    """Import vLLM in a thread with an empty stack: it keeps the errors of failed imports, whose tracebacks would keep
    alive the local variables of all callers."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(import_plugin).result()


@contextmanager
def collectable() -> Iterator[None]:
    """Undo vLLM's gc.freeze() on exit. It freezes every object that exists when it starts, so that a model among them
    could never be freed."""
    frozen = gc.get_freeze_count()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


@dataclass
class Process:
    """The vLLM state of this process."""
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
        PROCESS.clean = vllm_pool.wake_if_room(llm)
        llm.llm_engine.engine_core.shutdown()
    except Exception as error:  # noqa: BLE001 - a dead engine may raise anything, and is dropped in any case
        PROCESS.clean = False
        logger.warning("vLLM's engine did not end cleanly (%s: %s)", type(error).__name__, error)
    vllm_pool.drop_workspaces()


def explain(error: BaseException, policy: Policy) -> None:
    """Add a note to the error of a failed start of vLLM with the model and advice; our own errors have both already."""
    if isinstance(error, Exception) and not isinstance(error, BorrowError):
        error.add_note(f"{NOT_STARTED} with {type(policy.base).__name__} and these settings. Change them, or "
                       'sample with fast_inference="transformers"')


def is_of_start(error: Exception) -> bool:
    """Return True if the error means that vLLM cannot be used or did not start (it then has `explain`'s note)."""
    noted = any(note.startswith(NOT_STARTED) for note in getattr(error, "__notes__", ()))
    return noted or isinstance(error, EngineUnavailableError | BorrowError)
