"""A store on the host for the tensors that a graph saves for backward. At most two of them are on the device as well:
in forward the last two, in backward the tensor in use and the one needed next. If memory is short (`ahead` is False),
at most one is."""

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lowmem_grpo.memory.offload.pages import PAGE_BYTES, Copies, PagePool

MAX_RESIDENT = 2


@dataclass(eq=False)
class Offloaded:
    """The graph's reference to an offloaded tensor. `storage` is referenced so that its identity, which is part of a
    key in `HostStore.seen`, is not reused."""

    index: int  # increases in the order of forward
    pages: list[Tensor]
    span: int  # elements, including gaps between strides
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: StorageWeakRef
    spoiled: bool = False  # modified while it was being copied


@dataclass(eq=False)
class Resident:
    """An offloaded tensor that is on the device: as it was saved (`original`), or copied back from the host."""

    tensor: Tensor
    ticket: Any  # for the copy that reads or writes it
    original: bool
    version: int  # the tensor's version when the copy started
    settled: bool = False  # the compute stream already waits for that copy

    @property
    def touched(self) -> bool:
        return self.tensor._version != self.version

    @property
    def spoils(self) -> bool:
        """True if the original was modified while its copy may have been running, so the host may have either value."""
        return self.original and self.touched


class HostStore:
    """A host store: `put` offloads tensors in the order of forward, `get` returns them in any order. A tensor's pages
    live as long as the object that `put` returned is referenced."""

    def __init__(self, device: torch.device, copies: Copies, page_bytes: int = PAGE_BYTES) -> None:
        self.device, self.copies, self.pool = device, copies, PagePool(copies, page_bytes)
        self.indices = itertools.count()
        self.live: weakref.WeakValueDictionary[int, Offloaded] = weakref.WeakValueDictionary()  # by index
        self.seen: weakref.WeakValueDictionary[tuple, Offloaded] = weakref.WeakValueDictionary()  # by content
        self.residents: dict[int, Resident] = {}  # by index
        self.ahead = True  # prefetch the tensor that backward will need next
        self.start_backward()

    def start_backward(self) -> None:
        """Prepare for a new backward pass, which is expected to go from high to low indices."""
        self.asked: set[int] = set()  # indices returned in this backward pass
        self.edge: int | None = None  # the last index returned for the first time
        self.upwards = False

    def put(self, tensor: Tensor) -> Offloaded:
        """Start the copy of `tensor` to the host, unless it was copied before and has not changed since."""
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (storage.cdata, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype, tensor._version)
        packed = self.seen.get(key)
        if packed is None:
            packed = self.seen[key] = self.send(tensor, storage)
        return packed

    def get(self, packed: Offloaded) -> Tensor:
        """Return the tensor on the device, ready for computation, and start the copy of the next one."""
        tensor = self.recall(packed)
        following = self.following(packed.index) if self.ahead else None
        wanted = {packed.index} if following is None else {packed.index, following.index}
        for index in set(self.residents) - wanted:
            self.drop(index)
        if following is not None and following.index not in self.residents:
            self.fetch(following)
        return tensor

    def send(self, tensor: Tensor, storage: StorageWeakRef) -> Offloaded:
        """Start the copy of a tensor to the host. First drop the oldest tensors from the device, to make room."""
        while len(self.residents) >= (MAX_RESIDENT if self.ahead else 1):
            self.drop(next(iter(self.residents)))
        flat = tensor.detach().as_strided((span(tensor),), (1,), tensor.storage_offset())
        pages = self.pool.take_pages(flat.numel() * flat.element_size())
        index = next(self.indices)
        packed = Offloaded(index, pages, flat.numel(), tensor.size(), tensor.stride(), tensor.dtype, storage)
        weakref.finalize(packed, self.forget, index, pages)
        ticket = self.copies.start(list(self.pool.pairs(pages, flat)))
        self.live[index] = packed
        self.residents[index] = Resident(tensor.detach(), ticket, True, tensor._version)
        return packed

    def recall(self, packed: Offloaded) -> Tensor:
        """Return the tensor on the device. RuntimeError if it was modified while it was being copied."""
        resident = self.residents.get(packed.index)
        packed.spoiled |= resident is not None and resident.spoils
        check_untouched(not packed.spoiled, packed.size)
        if resident is None or resident.touched:  # backward may write to a returned tensor; the host's copy is right
            resident = self.fetch(packed)
        if not resident.original:
            self.settle(resident)
        return resident.tensor

    def fetch(self, packed: Offloaded) -> Resident:
        flat = torch.empty(packed.span, dtype=packed.dtype, device=self.device)
        ticket = self.copies.start([(part, page) for page, part in self.pool.pairs(packed.pages, flat)])
        resident = Resident(flat.as_strided(packed.size, packed.stride), ticket, False, flat._version)
        self.residents[packed.index] = resident
        return resident

    def following(self, index: int) -> Offloaded | None:
        """Return the tensor that backward probably needs after `index`: the next in order that was not returned yet."""
        if index in self.asked and self.asked.issuperset(self.live):
            self.start_backward()  # a second backward pass on a retained graph
        if index not in self.asked:
            self.upwards = self.edge is not None and index > self.edge
            self.edge = index
            self.asked.add(index)
        assert self.edge is not None
        waiting = [other for other in list(self.live) if other not in self.asked]
        above, below = ([other for other in waiting if (other > self.edge) is side] for side in (True, False))
        return self.live.get(min(above, default=-1) if self.upwards else max(below, default=-1))

    def drop(self, index: int) -> None:
        """Drop a tensor from the device, if it is there; its host copy stays."""
        resident, packed = self.residents.pop(index, None), self.live.get(index)
        if resident is not None:
            if packed is not None:
                packed.spoiled |= resident.spoils
            self.settle(resident)

    def settle(self, resident: Resident) -> None:
        """Make the compute stream wait for the copy that reads or writes this tensor, unless it does so already."""
        if not resident.settled:
            self.copies.wait(resident.ticket)
            resident.settled = True

    def forget(self, index: int, pages: list[Tensor]) -> None:
        """Give the pool back the pages of a tensor that nothing references any more."""
        self.pool.return_pages(pages)
        self.drop(index)


def span(tensor: Tensor) -> int:
    """Return the number of elements from a strided tensor's first to its last, including gaps; 0 if it is empty."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def check_untouched(untouched: bool, size: torch.Size) -> None:
    """Raise RuntimeError, like autograd's own, if a tensor that backward needs was modified after it was saved."""
    if not untouched:
        raise RuntimeError(f"a tensor of shape {tuple(size)} that backward needs was modified by an in-place operation "
                           "after it was saved; clone it before that operation")
