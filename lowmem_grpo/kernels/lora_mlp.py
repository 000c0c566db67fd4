"""A gated MLP on frozen weights with LoRA that keeps only x, gate and up, or only x.

    gate, up = x W_g^T + LoRA, x W_u^T + LoRA;  h = act(gate) * up;  y = h W_d^T + LoRA

`lora.py` has the formulas of the linear layers, `glu.py` those of the activation. The backward pass writes d_gate over
gate, d_up over up and h, computed again, over dh: two buffers (N, F) are kept and one is made; F is the inner size.

In tiles of t rows only x is kept and no buffer is larger than (t, F): the backward pass computes gate and up of a tile
again. The first of two autograd nodes saves x and computes all gradients; the second computes y, saves nothing, and
passes dy back unchanged. So a checkpoint around them that stops at the last saved tensor (as torch's non-reentrant one
does) never computes y a second time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels import lora
from lowmem_grpo.kernels.custom_op import once_differentiable
from lowmem_grpo.kernels.frozen_weight import FrozenWeight, frozen_weight
from lowmem_grpo.kernels.glu import APPROXIMATE, activate_ref, glu_backward, glu_forward, halves
from lowmem_grpo.kernels.lora_factors import Factors, LoRA, held_factors, shared_factors
from lowmem_grpo.kernels.thin_products import Product, multiply


def lora_mlp_ref(
    x: Tensor, gate: Tensor, up: Tensor | None, down: Tensor, *, gate_lora: LoRA | None = None,
    up_lora: LoRA | None = None, down_lora: LoRA | None = None, activation: str = "silu",
) -> Tensor:
    """Compute `lora_mlp` in plain torch."""
    g = lora.lora_linear_ref(x, gate, gate_lora)
    g, u = g.chunk(2, -1) if up is None else (g, lora.lora_linear_ref(x, up, up_lora))
    return lora.lora_linear_ref(activate_ref(g, activation) * u, down, down_lora)


def lora_mlp(
    x: Tensor, gate: Any, up: Any, down: Any, *, gate_lora: LoRA | None = None, up_lora: LoRA | None = None,
    down_lora: LoRA | None = None, activation: str = "silu", tile_rows: int | None = None,
) -> Tensor:
    """Return y (..., out) for x (..., in).

    gate, up (F, in) and down (out, F) are frozen weights as in `lora_linear`. With `up=None`, `gate` has both: as one
    matrix (2 F, in), gate's rows first, with one LoRA (as in Phi-3), or as a quantized weight of two adjacent matrices,
    gate and up, each with its own LoRA. activation: "silu", "gelu_tanh" or "gelu". With `tile_rows` (at least 1; out =
    in) rows are computed in tiles of that size, and the backward pass computes the two projections' outputs again.
    Without it, these outputs are saved, and the backward pass overwrites them, so that a second one raises
    RuntimeError.
    """
    inner = [frozen_weight(weight) for weight in ((gate,) if up is None else (gate, up))]
    both = len(list(lora.shapes_of(inner))) == 1
    if both and up_lora is not None:
        raise ValueError("up_lora was given without up: with one matrix for gate and up, gate_lora covers both")
    loras = [gate_lora, down_lora] if both else [gate_lora, up_lora, down_lora]
    weights = MLPWeights(inner, frozen_weight(down), lora.scales_of(loras), activation)
    lora.check_linears(x, inner, loras[:-1])
    check_mlp(x, weights, loras[-1])
    rows, tensors = x.reshape(-1, x.shape[-1]), lora.tensors_of(loras)
    if tile_rows is not None and (not isinstance(tile_rows, Integral) or tile_rows < 1):
        raise ValueError(f"tile_rows is {tile_rows!r}; it must be at least 1, and a whole number")
    if tile_rows is not None and weights.down.shape[0] != x.shape[-1]:
        raise ValueError(f"in tiles, expected out = in = {x.shape[-1]}; got a down weight {tuple(weights.down.shape)}")
    if not torch.is_grad_enabled() and (tile_rows is None or len(rows) <= tile_rows):
        inside, down_factors = held_factors([loras[:-1], loras[-1:]], x.dtype)
        y = weights.output(lora.forward_linears(rows, weights.inner, inside), down_factors)
    elif tile_rows is None:
        y = LoRAMLPFunction.apply(rows, weights, *tensors)
    else:
        y = TileForward.apply(TileBackward.apply(rows, weights, tile_rows, *tensors), weights, tile_rows, tensors)
    return y.view(*x.shape[:-1], y.shape[-1])


@dataclass(frozen=True)
class MLPWeights:
    """The frozen weights of an MLP; `inner` holds gate and up, apart or adjacent, or as one matrix."""

    inner: list[FrozenWeight]
    down: FrozenWeight
    scales: list[float]
    activation: str

    @property
    def size(self) -> int:
        return sum(weight.shape[0] for weight in self.inner) // 2

    def factors(self, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> tuple[Factors | None, Factors | None]:
        """Return the LoRA factors on the input (gate, up) and on the inner values (down)."""
        loras = lora.pairs_of(tensors, self.scales)
        inner, down = shared_factors([loras[:-1], loras[-1:]], dtype)
        return inner, down

    def output(self, inner: list[Tensor], factors: Factors | None) -> Tensor:
        """Return y (N, out) from [gate, up] (N, F), or [both] (N, 2 F), with the factors of down."""
        h = glu_forward(*halves(*inner), self.activation)
        return lora.forward_linears(h, [self.down], factors)[0]


class LoRAMLPFunction(torch.autograd.Function):
    """Computes all rows at once. gate and up are saved, and the backward pass reuses their buffers."""

    @staticmethod
    def forward(ctx, x, weights, *tensors):
        factors = weights.factors(tensors, x.dtype)
        inner = lora.forward_linears(x, weights.inner, factors[0])
        ctx.weights, ctx.count = weights, len(tensors)
        ctx.save_for_backward(x, *tensors, *inner)
        return weights.output(inner, factors[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, *saved = ctx.saved_tensors
        tensors, inner = saved[: ctx.count], saved[ctx.count :]
        factors = ctx.weights.factors(tensors, x.dtype)
        grad_x, grads = gradients(grad, x, inner, ctx.weights, factors, ctx.needs_input_grad[0])
        return grad_x, None, *lora.as_given(grads, tensors)


class TileBackward(torch.autograd.Function):
    """Saves x and passes it on. Its backward pass gets dy from `TileForward` and computes all gradients."""

    @staticmethod
    def forward(ctx, x, weights, tile_rows, *tensors):
        ctx.weights, ctx.tile_rows = weights, tile_rows
        ctx.save_for_backward(x, *tensors)
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, *tensors = ctx.saved_tensors
        factors = ctx.weights.factors(tensors, x.dtype)
        needs_x, one_tile = ctx.needs_input_grad[0], len(x) <= ctx.tile_rows
        grad_x = torch.empty_like(x) if needs_x and not one_tile else None
        totals: list[Tensor | None] = [None] * len(tensors)
        for rows in tiles(len(x), ctx.tile_rows):
            inner = lora.forward_linears(x[rows], ctx.weights.inner, factors[0])
            share, grads = gradients(grad[rows], x[rows], inner, ctx.weights, factors, needs_x)
            if grad_x is None or share is None:
                grad_x = share
            else:
                grad_x[rows] = share
            pairs = zip(totals, grads, strict=True)
            totals = [total if part is None else part if total is None else total.add_(part) for total, part in pairs]
            del inner, share, grads  # before those of the next tile are made
        return grad_x, None, None, *lora.as_given(totals, tensors)


class TileForward(torch.autograd.Function):
    """Computes y of the x that `TileBackward` saved. Its backward pass passes dy on unchanged."""

    @staticmethod
    def forward(ctx, x, weights, tile_rows, tensors):
        inner, down = weights.factors(tensors, x.dtype)
        if len(x) <= tile_rows:
            return weights.output(lora.forward_linears(x, weights.inner, inner), down)
        y = torch.empty_like(x)
        for rows in tiles(len(x), tile_rows):
            y[rows] = weights.output(lora.forward_linears(x[rows], weights.inner, inner), down)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None, None, None


def tiles(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, max(rows, 1), size))  # one empty tile of no rows


def gradients(
    grad: Tensor, x: Tensor, inner: list[Tensor], weights: MLPWeights, factors: tuple[Factors | None, Factors | None],
    needs_x: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return dx (N, in) or None, and dA, dB of each layer in float32; overwrites gate and up."""
    gate, up = halves(*inner)
    of_inner, of_down = factors
    grad_h = lora.back_to_x([grad], [weights.down])
    assert grad_h is not None
    first: list[Product] = []
    then: list[Product] = []
    down_grads: list[Tensor | None] = [None, None]
    grad_low = None if of_down is None else of_down.grad_low([grad], first)
    multiply(first)
    if of_down is not None and grad_low is not None:
        grad_h.addmm_(grad_low, of_down.a)
    glu_backward(grad_h, gate, up, weights.activation)  # gate, up: their gradients now; grad_h: h
    first.clear()
    if of_down is not None and grad_low is not None:
        down_grads = of_down.gradients([grad], grad_low, grad_h, first, then)
    grad_x, inner_grads = lora.backward_linears(inner, x, weights.inner, of_inner, needs_x, first, then)
    return grad_x, [*inner_grads, *down_grads]


def check_mlp(x: Tensor, weights: MLPWeights, down_lora: LoRA | None) -> None:
    """Raise ValueError, with the expected and the given values, for an argument that does not fit."""
    if weights.activation not in APPROXIMATE:
        raise ValueError(f"activation is {weights.activation!r}; it must be one of {list(APPROXIMATE)}")
    shapes = [shape for shape, _ in lora.shapes_of(weights.inner)]
    if len(shapes) == 2 and shapes[0] != shapes[1]:
        raise ValueError(f"expected gate and up of one shape; got {shapes[0]}, {shapes[1]}")
    inner = torch.empty(0, weights.size, dtype=x.dtype, device=x.device)
    lora.check_linears(inner, [weights.down], [down_lora])
