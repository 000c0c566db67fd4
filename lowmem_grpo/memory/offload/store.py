"""Tensors that a graph keeps for backward, held on the host; at most two of them are on the device as well: on their
way out until the copy after the next one starts, and on their way back the one in use and the one that is wanted next.
Where memory is short (`ahead` is False), there is only one.
"""

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
    """In the graph: where a tensor's bytes are on the host, and how to make it from them. `storage` is not read: while
    it is held, no other storage can take the identity that `HostStore.seen` knows."""

    index: int  # counts up, in the order of forward
    pages: list[Tensor]
    span: int  # elements, gaps between strides counted in
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: StorageWeakRef
    spoiled: bool = False  # written to while it was being copied


@dataclass(eq=False)
class Resident:
    """On the device: an offloaded tensor as it was saved (`original`), or as it came back from the host."""

    tensor: Tensor
    ticket: Any  # for the copy that reads or writes it
    original: bool
    version: int  # that it had when the copy started
    settled: bool = False  # the computation waits for that copy already

    @property
    def touched(self) -> bool:
        return self.tensor._version != self.version


class HostStore:
    """Takes tensors in with `put`, in the order of forward, and gives them back with `get`, in any order. What `put`
    returned is all that keeps a tensor's pages: they are free again once nobody holds it any more."""

    def __init__(self, device: torch.device, copies: Copies, page_bytes: int = PAGE_BYTES) -> None:
        self.device, self.copies, self.pool = device, copies, PagePool(copies, page_bytes)
        self.indices = itertools.count()
        self.live: weakref.WeakValueDictionary[int, Offloaded] = weakref.WeakValueDictionary()  # by index
        self.seen: weakref.WeakValueDictionary[tuple, Offloaded] = weakref.WeakValueDictionary()  # by content
        self.residents: dict[int, Resident] = {}  # by index
        self.ahead = True  # the one that is wanted next comes back before it is
        self.start_backward()

    def start_backward(self) -> None:
        """A new backward is to come, and it goes downwards."""
        self.asked: set[int] = set()  # indices that this backward was given
        self.edge: int | None = None  # the one given last that was not given before
        self.upwards = False

    def put(self, tensor: Tensor) -> Offloaded:
        """Start the copy of `tensor` to the host; one that is there already, unchanged, is not copied again."""
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (storage.cdata, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype, tensor._version)
        packed = self.seen.get(key)
        if packed is None:
            packed = self.seen[key] = self.send(tensor, storage)
        return packed

    def get(self, packed: Offloaded) -> Tensor:
        """The tensor, ready to be computed with on the device; starts the copy of the one wanted next."""
        tensor = self.recall(packed)
        following = self.following(packed.index) if self.ahead else None
        wanted = {packed.index} if following is None else {packed.index, following.index}
        for index in set(self.residents) - wanted:
            self.retire(index)
        if following is not None and following.index not in self.residents:
            self.fetch(following)
        return tensor

    def send(self, tensor: Tensor, storage: StorageWeakRef) -> Offloaded:
        """Start the copy of a tensor to the host; those resident longest go first, so that there is room."""
        while len(self.residents) >= (MAX_RESIDENT if self.ahead else 1):
            self.retire(next(iter(self.residents)))
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
        """Return the tensor on the device. RuntimeError where it was written to while it was copied."""
        resident = self.residents.get(packed.index)
        self.note_spoiled(packed)
        check_untouched(not packed.spoiled, packed.size)
        if resident is None or resident.touched:  # a backward may write to what it was given: the host knows better
            resident = self.fetch(packed)
        if not resident.original:
            self.settle(resident)
        return resident.tensor

    def fetch(self, packed: Offloaded) -> Resident:
        """Start the copy back from the host."""
        flat = torch.empty(packed.span, dtype=packed.dtype, device=self.device)
        ticket = self.copies.start([(part, page) for page, part in self.pool.pairs(packed.pages, flat)])
        resident = Resident(flat.as_strided(packed.size, packed.stride), ticket, False, flat._version)
        self.residents[packed.index] = resident
        return resident

    def following(self, index: int) -> Offloaded | None:
        """Return the tensor that backward probably wants after `index`: the next in its direction not yet given."""
        if index in self.asked and self.asked.issuperset(self.live):
            self.start_backward()  # all over again, on a graph that was kept
        if index not in self.asked:
            self.upwards = self.edge is not None and index > self.edge
            self.edge = index
            self.asked.add(index)
        assert self.edge is not None
        waiting = [other for other in list(self.live) if other not in self.asked]
        if self.upwards:
            return self.live.get(min((other for other in waiting if other > self.edge), default=-1))
        return self.live.get(max((other for other in waiting if other < self.edge), default=-1))

    def note_spoiled(self, packed: Offloaded) -> None:
        """Remember that the original was written to while it may have been on its way: the host may hold either."""
        resident = self.residents.get(packed.index)
        packed.spoiled |= resident is not None and resident.original and resident.touched

    def retire(self, index: int) -> None:
        """Drop a tensor from the device; the host keeps it."""
        packed = self.live.get(index)
        if packed is not None:
            self.note_spoiled(packed)
        self.drop(index)

    def drop(self, index: int) -> None:
        resident = self.residents.pop(index, None)
        if resident is not None:
            self.settle(resident)

    def settle(self, resident: Resident) -> None:
        """Make the computation wait for the copy that reads or writes a resident, once."""
        if not resident.settled:
            self.copies.wait(resident.ticket)
            resident.settled = True

    def forget(self, index: int, pages: list[Tensor]) -> None:
        """Give back the pages of a tensor that nobody holds any more."""
        self.pool.return_pages(pages)
        self.drop(index)


def span(tensor: Tensor) -> int:
    """Elements of memory from a strided tensor's first to its last, gaps counted in; 0 for an empty one."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def check_untouched(untouched: bool, size: torch.Size) -> None:
    """RuntimeError, as autograd's own, where a tensor that backward needs was written to after it was saved."""
    if not untouched:
        raise RuntimeError(f"a tensor of shape {tuple(size)} that backward needs was modified by an in-place operation "
                           "after it was saved; clone it before that operation")
