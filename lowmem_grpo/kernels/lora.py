"""Linear layers with LoRA on one input (q, k, v; gate, up): frozen weights of any kind as one autograd node.

    y_i = x W_i^T + scale_i (x A_i^T) B_i^T
    dx = sum_i (dy_i W_i + scale_i (dy_i B_i) A_i);  dA_i = scale_i (dy_i B_i)^T x;  dB_i = scale_i dy_i^T (x A_i^T)

(Hu et al., arXiv 2106.09685, equation 3.) One product with x applies all the A_i. The backward pass repeats this
product, so that only x is kept. x (N, in), W_i (out_i, in), A_i (r_i, in), B_i (out_i, r_i). Quantized weights that lie
one after the other in memory may be passed as one weight, which is then dequantized as a whole.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import check_numbers, check_tensors, once_differentiable
from lowmem_grpo.kernels.frozen_weight import (
    FrozenWeight,
    PlainWeight,
    check_frozen,
    frozen_weight,
    wide_weights,
)
from lowmem_grpo.kernels.lora_factors import Factors, LoRA, held, held_factors, shared_factors
from lowmem_grpo.kernels.lora_up import ONE_PRODUCT, lora_up
from lowmem_grpo.kernels.thin_products import Product, multiply


def lora_linear_ref(x: Tensor, weight: Tensor, lora: LoRA | None) -> Tensor:
    """Compute one layer of `lora_linear` in plain torch: x (..., in), weight (out, in) -> (..., out)."""
    y = x @ weight.T
    if lora is None:
        return y
    return y + lora.scale * ((x @ lora.a.to(x.dtype).T) @ lora.b.to(x.dtype).T)


def lora_linear(
    x: Tensor, weights: Sequence[Any], loras: Sequence[LoRA | None], biases: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """Return the outputs (..., out_i) of several linear layers on one x (..., in), which is saved once for all of them.

    A weight is a tensor (out, in) of the dtype of x, a `FrozenWeight` such as `NF4Weight`, or bitsandbytes' Params4bit.
    A quantized weight of several adjacent matrices counts as several layers. A layer without LoRA has None in `loras`.
    Weights and biases (out,) get no gradient. ValueError if shapes or dtypes do not fit.
    """
    if (isinstance(weights, Tensor) and weights.ndim < 3) or isinstance(loras, LoRA):
        raise ValueError("expected lists, with a weight and a LoRA or None of each layer: lora_linear(x, [weight], "
                         "[lora])")
    frozen = [frozen_weight(weight) for weight in weights]
    added = [None] * len(loras) if biases is None else list(biases)
    check_linears(x, frozen, loras)
    check_biases(frozen, added)
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled():
        outputs: Sequence[Tensor] = LoRALinearFunction.apply(rows, frozen, added, scales_of(loras), *tensors_of(loras))
    else:
        (factors,) = held_factors([loras], x.dtype)
        outputs = forward_linears(rows, frozen, factors, added)
    return tuple(output.view(*x.shape[:-1], output.shape[-1]) for output in outputs)


class LoRALinearFunction(torch.autograd.Function):
    """Saves x and the adapters. The backward pass computes only the products with A again."""

    @staticmethod
    def forward(ctx, x, weights, biases, scales, *tensors):
        ctx.weights, ctx.scales = weights, scales
        ctx.save_for_backward(x, *tensors)
        ctx.set_materialize_grads(False)
        (factors,) = shared_factors([pairs_of(tensors, scales)], x.dtype)
        return tuple(forward_linears(x, weights, factors, biases))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, *tensors = ctx.saved_tensors
        (factors,) = shared_factors([pairs_of(tensors, ctx.scales)], x.dtype)
        grad_x, grad_tensors = backward_linears(grads, x, ctx.weights, factors, ctx.needs_input_grad[0])
        return grad_x, None, None, None, *as_given(grad_tensors, tensors)


def forward_linears(
    x: Tensor, weights: Sequence[FrozenWeight], factors: Factors | None, biases: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """Return the outputs (N, out_i) for x (N, in), without autograd; `factors` are in the dtype of x."""
    wide = wide_weights()
    if wide is not None and factors is not None and len(weights) == 1 and weights[0].quantized and len(x) > wide.few:
        whole = wide.with_a(weights[0], factors.a)
        if len(x) <= ONE_PRODUCT:
            return by_one_product(x, whole, weights[0].out_features, factors, biases or [])
    outputs: list[Tensor] = []
    for weight in weights:
        count = len(weight.out_features)
        outputs += weight.project_each(
            x, [None] * count if biases is None else biases[len(outputs) : len(outputs) + count])
    if factors is not None:
        factors.add_to(outputs, x)
    return outputs


def by_one_product(
    x: Tensor, whole: Tensor, features: Sequence[int], factors: Factors, biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return the outputs (N, out_i) of a dequantized weight below which A lies: one product yields x W^T and x A^T."""
    sizes, bias = [*features, len(whole) - sum(features)], None
    if any(part is not None for part in biases):
        parts = zip(sizes, (*biases, None), strict=True)
        bias = held(("bias", sizes[-1], *map(id, biases)), biases, lambda: torch.cat([
            x.new_zeros(size) if part is None else part for size, part in parts]))
    *outputs, low = PlainWeight(whole).project(x, bias).split(sizes, 1)
    results = [x.new_empty(part.shape) for part in outputs]
    lora_up(results, outputs, low, factors.b, factors.scales)
    return results


def backward_linears(
    grads: Sequence[Tensor | None], x: Tensor, weights: Sequence[FrozenWeight], factors: Factors | None, needs_x: bool,
    waiting: Sequence[Product] = (), after: Sequence[Product] = (),
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return dx (N, in) or None, and [dA, dB of each layer] in float32 or float64; a dy_i may be None. No autograd.
    Products of other layers are computed in the same launches: `waiting` first, then `after`."""
    grad_x, first, then = back_to_x(grads, weights) if needs_x else None, [*waiting], [*after]
    grad_low = None if factors is None else factors.grad_low(grads, first)
    gradients: list[Tensor | None] = [None] * (2 * len(grads))
    if factors is not None and grad_low is not None:
        gradients = factors.gradients(grads, grad_low, x, first, then)
    multiply(first)
    added = [] if factors is None or grad_low is None or grad_x is None else [(grad_x, grad_low, factors.a, 1.0)]
    multiply(added + then, len(added))
    return grad_x, gradients


def back_to_x(grads: Sequence[Tensor | None], weights: Sequence[FrozenWeight]) -> Tensor | None:
    """Return sum_i dy_i W_i (N, in); None if all dy_i are None."""
    total, rest = None, iter(grads)
    for weight in weights:
        some = [next(rest) for _ in weight.out_features]
        if any(grad is not None for grad in some):
            total = weight.project_back(some, total)
    return total


def shapes_of(weights: Sequence[FrozenWeight]) -> Iterator[tuple[tuple[int, int], torch.dtype]]:
    """Yield (out_i, in) and dtype of each layer's weight."""
    for weight in weights:
        yield from (((size, weight.shape[1]), weight.dtype) for size in weight.out_features)


def as_given(grads: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return each gradient in the dtype of its tensor."""
    pairs = zip(grads, tensors, strict=True)
    return [None if grad is None or like is None else grad.to(like.dtype) for grad, like in pairs]


def tensors_of(loras: Sequence[LoRA | None]) -> list[Tensor | None]:
    """Return all a and b in one list, with None and None for a layer without LoRA."""
    return [tensor for lora in loras for tensor in ((None, None) if lora is None else (lora.a, lora.b))]


def scales_of(loras: Sequence[LoRA | None]) -> list[float]:
    return [0.0 if lora is None else lora.scale for lora in loras]


def pairs_of(tensors: Sequence[Tensor | None], scales: Sequence[float]) -> list[LoRA | None]:
    """Return the LoRA of each layer: the inverse of `tensors_of` and `scales_of`."""
    pairs = zip(tensors[::2], tensors[1::2], scales, strict=True)
    return [None if a is None or b is None else LoRA(a, b, scale) for a, b, scale in pairs]


def check_linears(x: Tensor, weights: Sequence[FrozenWeight], loras: Sequence[LoRA | None]) -> None:
    """Raise ValueError, with the expected and the given shapes and dtypes, for an argument that does not fit."""
    check_tensors(x=x)
    for weight in weights:
        if len(weight.shape) != 2 or weight.shape[1] != x.shape[-1] or weight.dtype != x.dtype:
            raise ValueError(f"expected a weight (out, {x.shape[-1]}) of {x.dtype}; got {tuple(weight.shape)} of "
                             f"{weight.dtype}")
        check_frozen(weight)
    shapes = list(shapes_of(weights))
    if len(shapes) != len(loras):
        raise ValueError(f"expected one entry of loras for each weight; got {len(shapes)} and {len(loras)}")
    for (shape, _), lora in zip(shapes, loras, strict=True):
        if lora is None:
            continue
        if not isinstance(lora, LoRA):
            raise ValueError(f"expected LoRA(a, b, scale), or None, for each weight; got a {type(lora).__name__}")
        check_tensors(a=lora.a, b=lora.b)
        check_numbers(scale=lora.scale)
        rank = lora.a.shape[0]
        expected = ((rank, shape[1]), (shape[0], rank))
        if (tuple(lora.a.shape), tuple(lora.b.shape)) != expected:
            raise ValueError(f"expected LoRA a {expected[0]} and b {expected[1]}; got {tuple(lora.a.shape)}, "
                             f"{tuple(lora.b.shape)}")


def check_biases(weights: Sequence[FrozenWeight], biases: Sequence[Tensor | None]) -> None:
    """Raise ValueError, with the expected and the given shapes and dtypes, for biases that do not fit."""
    shapes = list(shapes_of(weights))
    if len(biases) != len(shapes):
        raise ValueError(f"expected one entry of biases for each weight; got {len(shapes)} and {len(biases)}")
    for ((rows, _), dtype), bias in zip(shapes, biases, strict=True):
        if bias is not None and (tuple(bias.shape) != (rows,) or bias.dtype != dtype):
            raise ValueError(f"expected a bias ({rows},) of {dtype}; got {tuple(bias.shape)} of {bias.dtype}")
        if bias is not None and bias.requires_grad and torch.is_grad_enabled():
            raise ValueError("biases are frozen: call bias.requires_grad_(False) and train LoRA")
