"""A stack of checkpointed layers whose inputs go to the host, the gradients of a step, and copies on the CPU that are
as late as a side stream's may be."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lowmem_grpo.memory.offload.activations import ActivationOffload

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


TOKENS, WIDTH, LAYERS = 16, 24, 5
LAYER_INPUT = TOKENS * WIDTH * 4


class Layer(nn.Module):
    """Reads two tensors, drops out, and saves a lot inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden: Tensor, other: Tensor) -> Tensor:
        mixed = torch.nn.functional.dropout(torch.tanh(self.mix(hidden)) * other.exp(), 0.3)
        return hidden + self.out(mixed)


class Stack(nn.Module):
    """Checkpointed layers; `nested` puts the second half of them into one more checkpoint."""

    def __init__(self, layers: int = LAYERS, nested: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.nested, self.width = nn.ModuleList(Layer(width) for _ in range(layers)), nested, width

    def run(self, hidden: Tensor, other: Tensor, layers: Any) -> Tensor:
        for layer in layers:
            hidden = checkpoint(layer, hidden, other, use_reentrant=False)
        return hidden

    def forward(self, hidden: Tensor, other: Tensor) -> Tensor:
        half = len(self.layers) // 2 if self.nested else len(self.layers)
        hidden = self.run(hidden, other, self.layers[:half])
        if self.nested:
            hidden = checkpoint(self.run, hidden, other, self.layers[half:], use_reentrant=False)
        return hidden.square()


def inputs(seed: int = 1, tokens: int = TOKENS, width: int = WIDTH, device: Any = "cpu") -> tuple[Tensor, Tensor]:
    """Two activations; no leaves, which would stay where they are."""
    generator = torch.Generator().manual_seed(seed)
    hidden, other = (torch.randn(tokens, width, generator=generator).to(device).requires_grad_() for _ in range(2))
    return hidden * 1.5, other * 0.5


def offloading(model: nn.Module, copies: Any = None, page_bytes: int = 512) -> ActivationOffload:
    """Sends everything of half a page or more, in pages so small that a layer's input needs several."""
    copies = LateCopies() if copies is None else copies
    return ActivationOffload(model, copies, min_bytes=page_bytes // 2, page_bytes=page_bytes)


def grads(model: nn.Module) -> list[Tensor]:
    """The gradients, taken away from the parameters."""
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return [gradient.clone() for gradient in found]


def step(model: Stack, context: Any, inside: bool = False, seed: int = 1, tokens: int = TOKENS) -> list[Tensor]:
    """Gradients of one forward and backward, always with the same dropout; what is freed before the backward is
    written over."""
    device = next(model.parameters()).device
    torch.manual_seed(seed)
    with context:
        loss = model(*inputs(seed, tokens, model.width, device)).sum()
        if inside:
            loss.backward()
    if not inside:
        for _ in range(4):
            torch.full((tokens, model.width), float("nan"), device=device)
        loss.backward()
    return grads(model)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Equal bit for bit, and not nothing."""
    assert len(ours) == len(theirs) > 0
    assert all(gradient.abs().sum() > 0 for gradient in theirs)
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
