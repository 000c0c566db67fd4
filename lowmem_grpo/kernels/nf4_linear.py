"""Linear layers over a frozen 4-bit weight, with LoRA: one matrix, or several on one input (q, k, v; gate, up).

    y = x W^T + scale * (x A^T) B^T + bias
    dx = dy W + scale * (dy B) A;   dA = scale * (dy B)^T x;   dB = scale * dy^T (x A^T);   dbias = sum of dy over rows

x (..., in), W (out, in), A (r, in), B (out, r). With S adjacent matrices A is (S * r, in), applied by one product with
x, and the rows of B (out, r) that belong to matrix s get part s of x A^T. (QLoRA, Dettmers et al., arXiv 2305.14314,
equations 5 and 6.) The arithmetic is in x.dtype: the weight is dequantized into it, the adapters are converted.

A few rows on CUDA go through `nf4_decode`. With more rows, and in the backward pass, bands of the weight are
dequantized (`frozen.py`). Only tensors that a needed gradient uses are saved.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import check_numbers, check_tensors, once_differentiable
from lowmem_grpo.kernels.frozen_weight import can_decode, decode
from lowmem_grpo.kernels.nf4 import NF4Weight, nf4_dequantize_ref


def nf4_linear_ref(
    x: Tensor, weight: NF4Weight, lora_a: Tensor | None = None, lora_b: Tensor | None = None,
    scale: float | Tensor = 1.0, bias: Tensor | None = None,
) -> Tensor:
    """Compute `nf4_linear` in plain torch, with W dequantized; differentiable by autograd."""
    y = x @ nf4_dequantize_ref(replace(weight, dtype=x.dtype)).T
    if lora_a is not None and lora_b is not None:
        inputs = (x @ lora_a.to(x.dtype).T).split(lora_b.shape[1], -1)
        factors = lora_b.to(x.dtype).split(weight.out_features)
        y = y + scale * torch.cat([part @ b.T for part, b in zip(inputs, factors, strict=True)], -1)
    return y if bias is None else y + bias.to(x.dtype)


def nf4_linear(
    x: Tensor, weight: Any, lora_a: Tensor | None = None, lora_b: Tensor | None = None, scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Return y (..., out) in x.dtype, from x (..., in) in float16, bfloat16 or float32 and a frozen 4-bit weight.

    weight: an NF4Weight or a Params4bit. lora_a (r, in) and lora_b (out, r): of any floating dtype, which their
    gradients have too. For S adjacent matrices both are stacked, with equal ranks: lora_a (S * r, in), lora_b (out, r);
    `lora_linear` takes them separately. scale: a number, or a tensor () on the device of x, which is never copied to
    the host. bias (out,). Raises ValueError if an argument does not fit.
    """
    weight = weight if isinstance(weight, NF4Weight) else NF4Weight.from_bitsandbytes(weight)
    check_arguments(x, weight, lora_a, lora_b, scale, bias)
    a, b, bias = (part if part is None else part.to(x.dtype) for part in (lora_a, lora_b, bias))
    y = NF4LinearFunction.apply(x.reshape(-1, x.shape[-1]), weight, a, b, scale, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def check_arguments(
    x: Tensor, weight: NF4Weight, lora_a: Tensor | None, lora_b: Tensor | None, scale: float | Tensor,
    bias: Tensor | None,
) -> None:
    """Raise ValueError, with the expected and the given shapes and dtypes, for an argument that does not fit."""
    check_tensors({"bias": bias}, x=x)
    out, columns = weight.shape
    if x.ndim < 1 or x.shape[-1] != columns or not x.is_floating_point():
        raise ValueError(f"expected x (..., {columns}) of a floating dtype; got {tuple(x.shape)} {x.dtype}")
    if not all(part is None or isinstance(part, Tensor) for part in (lora_a, lora_b)):
        raise ValueError("expected lora_a and lora_b as tensors: stack those of adjacent matrices, or call lora_linear")
    if (lora_a is None) != (lora_b is None):
        raise ValueError("expected lora_a and lora_b, or neither; got one of them")
    if lora_a is not None and lora_b is not None:
        rank = lora_b.shape[-1]
        if lora_b.shape != (out, rank) or lora_a.shape != (rank * len(weight.out_features), columns):
            raise ValueError(f"expected lora_a ({len(weight.out_features)} * rank, {columns}) and lora_b ({out}, "
                             f"rank); got {tuple(lora_a.shape)}, {tuple(lora_b.shape)}")
    if bias is not None and bias.shape != (out,):
        raise ValueError(f"expected bias ({out},); got {tuple(bias.shape)}")
    if isinstance(scale, Tensor) and (scale.ndim or scale.requires_grad):
        raise ValueError(f"expected scale () without a gradient; got {tuple(scale.shape)}, {scale.requires_grad}")
    check_numbers(scale=scale)
    parts = {"weight": weight.packed, "lora_a": lora_a, "lora_b": lora_b, "bias": bias, "scale": scale}
    for name, part in parts.items():
        if isinstance(part, Tensor) and part.device != x.device:
            raise ValueError(f"expected {name} on the device of x, {x.device}; got {part.device}")


class NF4LinearFunction(torch.autograd.Function):
    """Maps x (N, in) to (N, out); stacked adapters and bias have x's dtype. Keeps only what the gradients need."""

    @staticmethod
    def forward(ctx, x, weight, lora_a, lora_b, scale, bias):
        needs_x, _, needs_a, needs_b, _, _ = ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            xa = None if lora_a is None else torch.mm(x, lora_a.T)
            if can_decode(x, weight):
                y = decode(x, weight, xa, lora_b, scale, bias)
            else:
                y = weight.project(x, bias)
                if xa is not None:
                    low = xa * scale
                    for rows, part in adapter_parts(weight, lora_b.shape[1]):
                        y[:, rows].addmm_(low[:, part], lora_b[rows].T)
        ctx.weight, ctx.scale = weight, None if isinstance(scale, Tensor) else scale
        ctx.save_for_backward(x if needs_a else None, xa if needs_b else None, lora_a if needs_x else None,
                              lora_b if needs_x or needs_a else None, scale if isinstance(scale, Tensor) else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, xa, lora_a, lora_b, scale = ctx.saved_tensors
        scale = ctx.scale if scale is None else scale
        needs_x, _, needs_a, needs_b, _, needs_bias = ctx.needs_input_grad
        with torch.autocast(grad.device.type, enabled=False):
            grad_x, grad_a = ctx.weight.project_back([grad]) if needs_x else None, None
            if lora_b is not None:
                parts = [grad[:, rows] @ lora_b[rows] for rows, _ in adapter_parts(ctx.weight, 0)]
                grad_xa = torch.cat(parts, 1) * scale
                grad_x = grad_x.addmm_(grad_xa, lora_a) if grad_x is not None else None
                grad_a = grad_xa.T @ x if needs_a else None
            grad_b = None
            if needs_b:
                low, rank = xa * scale, xa.shape[1] // len(ctx.weight.out_features)
                parts = [grad[:, rows].T @ low[:, part] for rows, part in adapter_parts(ctx.weight, rank)]
                grad_b = torch.cat(parts)
        return grad_x, None, grad_a, grad_b, None, grad.sum(0) if needs_bias else None


def adapter_parts(weight: NF4Weight, rank: int) -> Iterator[tuple[slice, slice]]:
    """Yield, for each matrix, the slices of its rows in W and B and of its columns in x A^T."""
    start = 0
    for number, features in enumerate(weight.out_features):
        yield slice(start, start + features), slice(number * rank, (number + 1) * rank)
        start += features
