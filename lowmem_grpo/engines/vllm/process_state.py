"""What vLLM changes in the process it runs in, and how we put it back.

When it starts, vLLM seeds every random generator of the process, hooks torch.distributed into tracebacks, and freezes
every object against garbage collection. Its import keeps the errors of imports that failed.
"""

import gc
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch

from lowmem_grpo.engines.vllm.installed import import_plugin


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Whatever happens inside, the random states of Python, numpy and torch (CPU and `device`) are as before."""
    states, hook = (random.getstate(), np.random.get_state()), sys.excepthook
    try:
        with torch_undisturbed(device):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        sys.excepthook = hook


def torch_undisturbed(device: torch.device) -> AbstractContextManager[None]:
    """The same for torch's random states, the only ones that a step of the engine changes."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def import_from_a_thread() -> None:
    """Import vLLM on a stack of its own. It keeps the errors of imports that failed, and each error keeps the frames
    of all callers: a model that is a local variable of one of these could never be freed."""
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
