"""Gives freed memory back to the system while many tensors are made.

Quantizing on the CPU makes temporaries of several times a tensor's size and frees them, but the C library keeps the
room between what stays: after a few hundred tensors that can be more than the whole model in 16 bit.
"""

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 0.1  # seconds: about the time in which a tensor is quantized


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Inside, and once more at the end, freed pages go back to the system if the C library can do that (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    done = threading.Event()

    def work() -> None:
        while trim is not None and not done.wait(EVERY):
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
