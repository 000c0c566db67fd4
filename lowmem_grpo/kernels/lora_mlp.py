"""A gated MLP on frozen weights with LoRA, as one autograd node that keeps only x, gate and up, or only x.

    gate, up = x W_g^T + LoRA, x W_u^T + LoRA;  h = act(gate) * up;  y = h W_d^T + LoRA

Formulas of the linear layers and their gradients: `lora.py`; of the activation: `glu.py`. Plain autograd keeps x, gate,
up, act(gate), h and the small LoRA products. Here the backward pass writes d_gate over gate, d_up over up and h, made
again, over dh: two buffers (N, F) kept and one made, where F is the inner size, or none kept with `recompute`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowmem_grpo.kernels.glu import glu_backward, glu_forward, halves
from lowmem_grpo.kernels.lora import (
    FrozenWeight,
    LoRA,
    backward_linears,
    check_linears,
    forward_linears,
    frozen_weight,
    lora_linear_ref,
    pairs_of,
    scales_of,
    tensors_of,
)
from lowmem_grpo.kernels.nf4_linear import project_back

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"), "gelu": F.gelu,
}


def lora_mlp_ref(
    x: Tensor, gate: Tensor, up: Tensor | None, down: Tensor, *, gate_lora: LoRA | None = None,
    up_lora: LoRA | None = None, down_lora: LoRA | None = None, activation: str = "silu",
) -> Tensor:
    """The same in plain torch; without `up`, gate holds both halves (2 F, in)."""
    g = lora_linear_ref(x, gate, gate_lora)
    g, u = g.chunk(2, -1) if up is None else (g, lora_linear_ref(x, up, up_lora))
    return lora_linear_ref(ACTIVATIONS[activation](g) * u, down, down_lora)


def lora_mlp(
    x: Tensor, gate: Any, up: Any, down: Any, *, gate_lora: LoRA | None = None, up_lora: LoRA | None = None,
    down_lora: LoRA | None = None, activation: str = "silu", recompute: bool = False,
) -> Tensor:
    """y (..., out) for x (..., in).

    gate, up (F, in) and down (out, F): tensors of the dtype of x, `NF4Weight` or bitsandbytes' Params4bit, frozen. With
    `up=None` gate is one matrix (2 F, in), gate's rows first, as in Phi-3, with one LoRA. activation: "silu",
    "gelu_tanh" or "gelu". With `recompute` gate and up are made again in the backward pass, from x. Its buffers are
    used up by one backward pass: a second one raises RuntimeError unless `recompute` is set.
    """
    inner = [frozen_weight(weight) for weight in ((gate,) if up is None else (gate, up))]
    if up is None and up_lora is not None:
        raise ValueError("up_lora was given without up: with one matrix for gate and up, gate_lora covers both")
    loras = [gate_lora, down_lora] if up is None else [gate_lora, up_lora, down_lora]
    weights = MLPWeights(inner, frozen_weight(down), scales_of(loras), activation, recompute)
    check_linears(x, inner, loras[:-1])
    check_mlp(x, weights, loras[-1])
    y = LoRAMLPFunction.apply(x.reshape(-1, x.shape[-1]), weights, *tensors_of(loras))
    return y.view(*x.shape[:-1], y.shape[-1])


@dataclass(frozen=True)
class MLPWeights:
    """What an MLP is made of besides its LoRA tensors: inner holds gate and up, or one matrix with both."""

    inner: list[FrozenWeight]
    down: FrozenWeight
    scales: list[float]
    activation: str
    recompute: bool

    @property
    def size(self) -> int:
        """F, the inner size."""
        return sum(weight.shape[0] for weight in self.inner) // 2

    def gate_and_up(self, x: Tensor, loras: list[LoRA | None]) -> list[Tensor]:
        """[gate, up] (N, F), or [both] (N, 2 F)."""
        return forward_linears(x, self.inner, loras[:-1])


class LoRAMLPFunction(torch.autograd.Function):
    """Forward: gate and up, kept unless recomputed. Backward: down, activation, gate and up, in the same buffers."""

    @staticmethod
    def forward(ctx, x, weights, *tensors):
        loras = pairs_of(tensors, weights.scales)
        inner = weights.gate_and_up(x, loras)
        h = glu_forward(*halves(*inner), weights.activation)
        ctx.weights, ctx.count = weights, len(tensors)
        ctx.save_for_backward(x, *tensors, *([] if weights.recompute else inner))
        return forward_linears(h, [weights.down], loras[-1:])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weights = ctx.weights
        x, saved = ctx.saved_tensors[0], ctx.saved_tensors[1:]
        loras = pairs_of(saved[: ctx.count], weights.scales)
        inner = list(saved[ctx.count :]) or weights.gate_and_up(x, loras)
        gate, up = halves(*inner)
        grad_h = project_back(grad, weights.down)
        down_lora = loras[-1]
        if down_lora is not None:
            grad_h.addmm_(grad @ down_lora.b.to(grad.dtype), down_lora.a.to(grad.dtype), alpha=down_lora.scale)
        glu_backward(grad_h, gate, up, weights.activation)  # gate, up: their gradients now; grad_h: h
        _, down_grads = backward_linears([grad], grad_h, [weights.down], [down_lora], False)
        grad_x, inner_grads = backward_linears(inner, x, weights.inner, loras[:-1], ctx.needs_input_grad[0])
        return grad_x, None, *inner_grads, *down_grads


def check_mlp(x: Tensor, weights: MLPWeights, down_lora: LoRA | None) -> None:
    """Raise ValueError that says what was expected and what was got."""
    if weights.activation not in ACTIVATIONS:
        raise ValueError(f"activation is {weights.activation!r}; it must be one of {list(ACTIVATIONS)}")
    shapes = [tuple(weight.shape) for weight in weights.inner]
    if len(shapes) == 2 and shapes[0] != shapes[1]:
        raise ValueError(f"expected gate and up of one shape; got {shapes[0]}, {shapes[1]}")
    inner = torch.empty(0, weights.size, dtype=x.dtype, device=x.device)
    check_linears(inner, [weights.down], [down_lora])
