"""A side stream on the CPU that is as late as a real one may be: a copy happens when something waits for it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Place = tuple[StorageWeakRef, int, torch.Size, tuple[int, ...], torch.dtype]


def place(tensor: Tensor) -> Place:
    """Where a tensor lies, without keeping its memory alive."""
    size, stride = tensor.size(), tensor.stride()
    return StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), size, stride, tensor.dtype


def at(spot: Place) -> Tensor:
    """The tensor that lies there; fails where its memory was freed."""
    reference, offset, size, stride, dtype = spot
    storage: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    assert storage is not None, "memory was freed before the copy that uses it"
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


class LateCopies:
    """First started, first done, and each as late as possible. `log` tells what happened, `most` copied at a time."""

    def __init__(self) -> None:
        self.pending: list[list[tuple[Place, Place]]] = []
        self.pages: list[Tensor] = []
        self.log: list[str] = []
        self.started = self.most = self.drained = self.trimmed = 0

    def page(self, num_bytes: int) -> Tensor:
        self.pages.append(torch.full((num_bytes,), 0xFF, dtype=torch.uint8))
        return self.pages[-1]

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> int:
        homes = {page.untyped_storage()._cdata for page in self.pages}
        to_host = all(target.untyped_storage()._cdata in homes for target, _ in pairs)
        for target, _ in pairs if not to_host else ():
            target.fill_(0xFF)  # not a number, until the copy arrives
        self.log.append("out" if to_host else "back")
        self.pending.append([(place(target), place(source)) for target, source in pairs])
        self.started += 1
        self.most = max(self.most, len(self.pending))
        return self.started

    def wait(self, ticket: int) -> None:
        self.log.append(f"wait {ticket}")
        for _ in range(ticket - self.started + len(self.pending)):
            for target, source in self.pending.pop(0):
                at(target).copy_(at(source))

    def drain(self) -> None:
        self.wait(self.started)
        self.drained += 1

    def trim(self) -> None:
        self.trimmed += 1
