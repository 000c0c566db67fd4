"""A stack of checkpointed layers whose inputs go to the host, on the CPU or a card, and the gradients of a step."""

from typing import Any

import torch
from late_copies import LateCopies
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_grpo.offload.activations import ActivationOffload

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
