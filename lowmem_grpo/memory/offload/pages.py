"""Reusable pages of host memory, and the copies to and from them. All pages have one size, so that tensors of any
length share them."""

import logging
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.utils import GIB, size_text

logger = logging.getLogger(__name__)

# A power of two, because torch rounds pinned memory up to one: a buffer of 160 MiB would take 256.
PAGE_BYTES = 4 * 2**20
Pair = tuple[Tensor, Tensor]  # target and source of a copy, of the same shape


class Copies:
    """Synchronous copies between device and host, for tests and measurements on fake tensors."""

    def page(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def start(self, pairs: Sequence[Pair]) -> Any:
        """Copy each source to its target, after all computation and copies so far; return a ticket for `wait`."""
        for target, source in pairs:
            target.copy_(source)

    def wait(self, ticket: Any) -> None:
        """Make all later computation wait for the copies of this ticket, which `start` returned."""

    def drain(self) -> None:
        """Block until every copy is done."""

    def trim(self) -> None:
        """Return the memory of unreferenced pages to the system."""


class StreamCopies(Copies):
    """Asynchronous copies on one side stream of a CUDA device, to and from pinned pages. Both directions share the
    stream, so a returned page can be refilled at once: the copy that reads it comes first. Device tensors belong to the
    compute stream, which must wait for a tensor's copy (`wait`) before the tensor is freed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device)
        self.pinned = True

    def page(self, num_bytes: int) -> Tensor:
        """Allocate a pinned page. If the system refuses, warn, and allocate pageable memory from then on."""
        if self.pinned:
            try:
                return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self.pinned = False
                logger.warning(
                    "the system refused pinned host memory (%s); layer inputs go to pageable memory instead: each "
                    "copy then blocks Python and does not overlap with the computation. To avoid it raise the limit "
                    "of locked memory (ulimit -l), free host memory, or set use_gradient_checkpointing=True",
                    str(error).partition("\n")[0])
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def start(self, pairs: Sequence[Pair]) -> tuple[Any, Any]:
        """Start the copies; the ticket is (an event after them, the current compute stream)."""
        compute = torch.cuda.current_stream(self.device)
        self.side.wait_stream(compute)
        with torch.cuda.stream(self.side):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self.side.record_event(), compute

    def wait(self, ticket: tuple[Any, Any]) -> None:
        event, compute = ticket
        for stream in {compute, torch.cuda.current_stream(self.device)}:
            stream.wait_event(event)

    def drain(self) -> None:
        self.side.synchronize()

    def trim(self) -> None:
        empty_cache = getattr(torch.accelerator, "empty_host_cache", None)  # torch 2.11 may lack it
        if empty_cache is not None:
            empty_cache()


class PagePool:
    """A pool of pages. `return_pages` may be called at any time and from any thread, even by the garbage collector,
    because it does only one deletion and one append per page."""

    def __init__(self, copies: Copies, page_bytes: int = PAGE_BYTES) -> None:
        self.copies, self.page_bytes = copies, page_bytes
        self.free: list[Tensor] = []
        self.in_use: dict[int, Tensor] = {}  # by id
        self.peak_bytes = 0

    @property
    def bytes_in_use(self) -> int:
        """The host bytes of the pages in use."""
        return len(self.in_use) * self.page_bytes

    def take_pages(self, num_bytes: int) -> list[Tensor]:
        count = -(-num_bytes // self.page_bytes)
        missing = count - len(self.free)
        self.free += [self.copies.page(self.page_bytes) for _ in range(missing)]  # if one fails, none is taken
        pages = [self.free.pop() for _ in range(count)]
        self.in_use |= {id(page): page for page in pages}
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_use)
        return pages

    def return_pages(self, pages: Sequence[Tensor]) -> None:
        """Mark pages as free. Copies that still run on a page end before the page is used again."""
        for page in pages:
            del self.in_use[id(page)]
            self.free.append(page)

    def pairs(self, pages: Sequence[Tensor], flat: Tensor) -> Iterator[Pair]:
        """Yield each page, cut to the length needed, with the part of `flat` (N,) that it stores, both as bytes."""
        for page, part in zip(pages, flat.view(torch.uint8).split(self.page_bytes), strict=True):
            yield page[: len(part)], part

    def storages(self) -> list[torch.UntypedStorage]:
        return [page.untyped_storage() for page in [*self.free, *self.in_use.values()]]

    def release(self) -> None:
        """Return all free pages to the system, after every copy is done."""
        self.copies.drain()
        self.free.clear()
        self.copies.trim()


# Checks before a run that host memory has room for its layer inputs

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # a container's own limits (version 2)
TAIL = 4  # tensors saved after the layers, in units of a layer input: the final norm in float32, and the head's U
SPARE = GIB  # room left for other programs, since pinned memory cannot be swapped out
WSL_ADVICE = ("this is WSL: its driver pins only a part of the host's memory, and a paged optimizer's states are read "
              "only when the card is idle. If pinning fails, take use_gradient_checkpointing=True in place of "
              '"offload", and optim="adamw_8bit" in place of a paged one')


def host_bytes_needed(num_layers: int, tokens: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Return the most host bytes that offloading holds for a micro-batch of `tokens`, in whole pages: an input (tokens,
    hidden_size) for each layer, and TAIL more."""
    layer_input = tokens * hidden_size * dtype.itemsize
    return (num_layers + TAIL) * -(-layer_input // PAGE_BYTES) * PAGE_BYTES


def available_host_bytes() -> int | None:
    """Return the host bytes available without swapping to the system or container; None if unknown (outside Linux)."""
    known = [room for room in (system_room(MEMINFO), container_room(CGROUP)) if room is not None]
    return min(known, default=None)


def system_room(meminfo: Path) -> int | None:
    """Return MemAvailable of /proc/meminfo, in bytes."""
    if not meminfo.is_file():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def container_room(cgroup: Path) -> int | None:
    """Return the bytes that a control group may still allocate, droppable file cache included; None: no limit."""
    limit, used, details = (cgroup / f"memory.{name}" for name in ("max", "current", "stat"))
    if not (limit.is_file() and used.is_file() and details.is_file()) or limit.read_text().strip() == "max":
        return None
    droppable = dict(line.split() for line in details.read_text().splitlines()).get("inactive_file", 0)
    return max(0, int(limit.read_text()) - int(used.read_text()) + int(droppable))


def check_host_room(needed_bytes: int) -> None:
    """Raise MemoryError if the host has no room for `needed_bytes`; warn if little is left or the room is unknown."""
    available = available_host_bytes()
    if available is None:
        logger.warning("cannot tell whether the host has %s for layer inputs", size_text(needed_bytes))
        return
    left = available - needed_bytes
    figures = (f"layer inputs on the host need {size_text(needed_bytes)} ({needed_bytes} bytes), and "
               f"{size_text(available)} ({available} bytes) of host memory are available")
    remedy = ("lower max_tokens_per_micro_batch, free host memory, or set use_gradient_checkpointing=True, which "
              "keeps layer inputs on the device")
    if left < 0:
        raise MemoryError(f"{figures}; {remedy}")
    if left < SPARE:
        logger.warning("%s; that leaves %s for everything else: %s", figures, size_text(left), remedy)


def on_wsl() -> bool:
    """Return whether this is WSL, whose driver pins less memory and has no managed memory access during kernels."""
    return "microsoft" in platform.uname().release.lower()
