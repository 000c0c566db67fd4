"""Checks before a run that host memory has room for its layer inputs."""

import logging
import platform
from pathlib import Path

import torch

from lowmem_grpo.memory.offload.pages import PAGE_BYTES
from lowmem_grpo.utils import GIB, size_text

logger = logging.getLogger(__name__)

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # a container's own limits (version 2)
TAIL = 4  # layer inputs' worth of what the model saves behind its layers: the final norm in float32, and the head's U
SPARE = GIB  # pinned memory cannot be swapped out: with less than this left, other programs suffer
WSL_ADVICE = (
    "this is WSL: its driver pins only a part of the host's memory, and a paged optimizer's states are read only when "
    'the card is idle. If pinning fails, take use_gradient_checkpointing=True in place of "offload", and '
    'optim="adamw_8bit" in place of a paged one'
)


def host_bytes_needed(num_layers: int, tokens: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Most host bytes that offloading holds for one micro-batch of `tokens`, in whole pages. Each layer's input is
    tokens * hidden_size elements of `dtype`; four more of them stand for what is saved between the last layer and the
    loss."""
    layer_input = tokens * hidden_size * dtype.itemsize
    return (num_layers + TAIL) * -(-layer_input // PAGE_BYTES) * PAGE_BYTES


def available_host_bytes() -> int | None:
    """Bytes that can be had without swapping: the system's, or a container's if fewer; None if this is not Linux."""
    known = [room for room in (system_room(MEMINFO), container_room(CGROUP)) if room is not None]
    return min(known, default=None)


def system_room(meminfo: Path) -> int | None:
    """Return MemAvailable of /proc/meminfo, in bytes."""
    if not meminfo.is_file():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def container_room(cgroup: Path) -> int | None:
    """Return how many bytes a control group may still take; the file cache that it can drop counts as room."""
    limit, used, details = (cgroup / f"memory.{name}" for name in ("max", "current", "stat"))
    if not (limit.is_file() and used.is_file() and details.is_file()) or limit.read_text().strip() == "max":
        return None
    droppable = dict(line.split() for line in details.read_text().splitlines()).get("inactive_file", 0)
    return max(0, int(limit.read_text()) - int(used.read_text()) + int(droppable))


def check_host_room(needed_bytes: int) -> None:
    """Raise MemoryError without room for `needed_bytes`; warn if little would be left or nothing is known."""
    available = available_host_bytes()
    if available is None:
        logger.warning("cannot tell whether the host has %s for layer inputs", size_text(needed_bytes))
        return
    left = available - needed_bytes
    figures = f"layer inputs on the host need {size_text(needed_bytes)} ({needed_bytes} bytes), and " \
              f"{size_text(available)} ({available} bytes) of host memory are available"
    remedy = "lower max_tokens_per_micro_batch, free host memory, or set use_gradient_checkpointing=True, which " \
             "keeps layer inputs on the device"
    if left < 0:
        raise MemoryError(f"{figures}; {remedy}")
    if left < SPARE:
        logger.warning("%s; that leaves %s for everything else: %s", figures, size_text(left), remedy)


def on_wsl() -> bool:
    """Return whether this is Linux inside Windows, whose driver pins less memory and shares none while kernels run."""
    return "microsoft" in platform.uname().release.lower()
