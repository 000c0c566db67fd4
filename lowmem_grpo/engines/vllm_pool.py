"""Memory that vLLM's sleep mode frees and brings back at the same addresses: room for a buffer that CUDA graphs read.

vLLM keeps what it allocates while it loads in a pool of tagged segments. `sleep(level=1)` unmaps all of them, copies
those tagged "weights" to the host and throws the rest away; `wake_up` maps every segment at its old address. This is
no public interface, so all use of it is in this file, and the versions are those in which its source was read.
"""

import torch
from torch import Tensor
from vllm import __version__, __version_tuple__
from vllm.device_allocator import cumem

from lowmem_grpo.engines.borrowed import BorrowError

CHECKED = ((0, 26), (0, 32))  # first and last version
TAG = "sampling_weights"  # of segments whose contents may be thrown away
SEGMENT = 32 << 20  # bytes: torch gives a segment of its own to 10 MiB or more, in steps of 2 MiB, with nothing left
ADVICE = 'Load the model with sampling_weights="4bit", or with enforce_eager=True, which needs no fixed addresses'


def why_not() -> str | None:
    """Why there is no such room here; None where there is."""
    if not CHECKED[0] <= __version_tuple__[:2] <= CHECKED[1]:
        first, last = (".".join(map(str, numbers)) for numbers in CHECKED)
        return f"the memory pool of vLLM {__version__} was not checked, only that of {first} to {last}"
    if not cumem.cumem_available:
        return "this build of vLLM has no memory pool that sleep can free"
    return None


class SleepingRoom:
    """One buffer in vLLM's pool, for as long as an engine lives; made while vLLM loads the model."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None  # bytes

    def take(self, numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(numbers,), always at the same address. BorrowError where the pool is not as it was when it was read."""
        size = numbers * dtype.itemsize
        if self.buffer is None:
            self.buffer = made_in_pool(-(-size // SEGMENT) * SEGMENT, device)
        return self.buffer[:size].view(dtype)


def made_in_pool(size: int, device: torch.device) -> Tensor:
    """(size,) bytes in a segment of their own, under our tag: nothing of vLLM's can lie in it and be thrown away."""
    if why := why_not():
        raise BorrowError(f"{why}. {ADVICE}")
    allocator = cumem.CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag=TAG):
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
    segment = allocator.pointer_to_data.get(buffer.data_ptr())
    if segment is None or (segment.tag, segment.handle[1]) != (TAG, size):
        found = "none" if segment is None else f"{segment.handle[1]:,} bytes tagged {segment.tag!r}"
        raise BorrowError(f"vLLM's memory pool gave no segment of {size:,} bytes tagged {TAG!r}, but {found}. {ADVICE}")
    return buffer
