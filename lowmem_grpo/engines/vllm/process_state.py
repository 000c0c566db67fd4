"""What vLLM changes in the process it runs in, put back; and seeds that need no state of the process.

When it starts, it seeds every random generator of the process, and torch.distributed hooks itself into tracebacks.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Whatever happens inside, the random states of Python, numpy and torch (CPU and `device`) are as before."""
    states, hook = (random.getstate(), np.random.get_state()), sys.excepthook
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        sys.excepthook = hook


def seeds_of(seed: int | None, count: int) -> list[int]:
    """A seed for each prompt, far apart: vLLM adds the number of the completion to it."""
    source = random.Random(seed) if seed is not None else random.SystemRandom()
    return [source.getrandbits(62) for _ in range(count)]
