"""What vLLM changes in the process it runs in, and how we put it back; the one engine that a process can have, and the
words where it does not start.

When it starts, vLLM seeds every random generator, hooks torch.distributed into tracebacks, and freezes every object
against garbage collection. Its import keeps the errors of imports that failed.
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
    """Whatever happens inside, the random states of Python, numpy and torch (CPU and `device`) are as before."""
    states, hook = (random.getstate(), np.random.get_state()), sys.excepthook
    try:
        with torch_states_kept(device):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        sys.excepthook = hook


def torch_states_kept(device: torch.device) -> AbstractContextManager[None]:
    """The same for torch's random states, the only ones that a step of the engine changes."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def import_from_a_thread() -> None:
    """Import vLLM on a stack of its own: it keeps errors of failed imports, and these the frames of all callers, with
    what is local there."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(import_plugin).result()


@contextmanager
def collectable() -> Iterator[None]:
    """Afterwards garbage collection sees what it saw before. vLLM freezes every object that exists when it starts, so
    a model among them could never be freed."""
    frozen = gc.get_freeze_count()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


@dataclass
class Process:
    engine: "weakref.ref[Any] | None" = None  # the VLLMEngine that is open
    clean: bool = True  # whether vLLM's memory pool can serve another engine as it is


PROCESS = Process()


def living() -> Any:
    engine = None if PROCESS.engine is None else PROCESS.engine()
    return engine if engine is not None and engine.llm is not None else None


def check_alone() -> None:
    """Raise EngineUnavailableError where another engine is open."""
    if living() is not None:
        gc.collect()  # it may be unreachable already
    if living() is not None:
        raise EngineUnavailableError("a vLLM engine lives in this process already; close() it first")


def end(llm: Any, loan: WeightSharing) -> None:
    """Shut vLLM down and return the trainer's tensors; also when an engine is deleted without `close`. A sleeping cache
    is unmapped already, and the pool fails if it unmaps it again, so we wake it first where memory has room."""
    loan.close()
    try:
        PROCESS.clean = vllm_pool.wake_if_room(llm)
        llm.llm_engine.engine_core.shutdown()
    except Exception as error:  # noqa: BLE001 - a dead engine may fail in any way, and has to go all the same
        PROCESS.clean = False
        logger.warning("vLLM's engine did not end cleanly (%s: %s)", type(error).__name__, error)
    vllm_pool.drop_workspaces()


def explain(error: BaseException, policy: Policy) -> None:
    """Add to the message of a failed start of vLLM what was tried and what to do; our own errors say it already."""
    if isinstance(error, Exception) and not isinstance(error, BorrowError):
        error.add_note(f"{NOT_STARTED} with {type(policy.base).__name__} and these settings. Change them, or "
                       'sample with fast_inference="transformers"')


def is_of_start(error: Exception) -> bool:
    """Return whether vLLM could not be used, or did not start: whatever it raised then has a note of `explain`."""
    noted = any(note.startswith(NOT_STARTED) for note in getattr(error, "__notes__", ()))
    return noted or isinstance(error, EngineUnavailableError | BorrowError)
