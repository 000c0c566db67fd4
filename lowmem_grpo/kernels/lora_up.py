"""LoRA's second product for all layers on one input, in one launch.

    out_i = y_i + scale_i low_i B_i^T        low_i: r_i columns of low = x A^T, one layer's after the other's

y_i, out_i (N, F_i), of any row strides; low (N, sum of r_i or more) and B_i (F_i, r_i) in the same dtype. out_i may be
y_i. The product is summed in float32 and added to y_i with one rounding, as by `addmm_`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import custom_op
from lowmem_grpo.kernels.triton_utils import TRITON_TYPES, Launch, Variant, capability, read, tl, triton, types_of

MOST = 3  # layers of a launch
ONE_PRODUCT = 512  # rows up to which y and low come from one product, of which the results are a copy
FEW = 64  # rows up to which blocks are small, so that a token step has enough of them


def lora_up_ref(out: list[Tensor], y: list[Tensor], low: Tensor, b: list[Tensor], scales: list[float]) -> None:
    """Compute all out_i by plain torch."""
    parts = low[:, : sum(factor.shape[1] for factor in b)].split([factor.shape[1] for factor in b], 1)
    for result, source, part, factor, scale in zip(out, y, parts, b, scales, strict=True):
        if result is not source:
            result.copy_(source)
        if factor.shape[1]:
            result.addmm_(part, factor.T, alpha=scale)


def launch_rule(rows: int, capability: int) -> Launch:
    """Return a launch of 8 numbers per thread for few rows, and of 32 for many (16 without tensor cores)."""
    block = 16 if rows <= FEW else 64 if capability >= 80 else 32
    return Launch({"BLOCK_N": block, "BLOCK_F": 64, "BLOCK_R": 16}, num_warps=4, num_stages=1)


@triton.jit
def write_tile(
    out_ptr, y_ptr, low_ptr, b_ptr, scale, block, N, size, rank, out_stride, y_stride, low_stride,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_R: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    column = block * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = (row < N) & (column < size)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_F), tl.float32)
    for first in range(0, rank, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)[None, :]
        low = tl.load(low_ptr + row * low_stride + r, mask=(row < N) & (r < rank), other=0.0)
        b = tl.load(b_ptr + column[:, None] * rank + r, mask=(column < size)[:, None] & (r < rank), other=0.0)
        total = tl.dot(low, tl.trans(b), total, input_precision="ieee")
    total = read(y_ptr + row * y_stride, column[None, :], inside) + scale * total
    tl.store(out_ptr + row * out_stride + column[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N"])
def lora_up_kernel(
    out_0_ptr, out_1_ptr, out_2_ptr, y_0_ptr, y_1_ptr, y_2_ptr, b_0_ptr, b_1_ptr, b_2_ptr, scale_0, scale_1, scale_2,
    size_0, size_1, size_2, rank_0, rank_1, rank_2, out_0, out_1, out_2, y_0, y_1, y_2, low_ptr, low_stride, N,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_R: tl.constexpr,
):
    block = tl.program_id(0)
    second = tl.cdiv(size_0, BLOCK_F)
    third = second + tl.cdiv(size_1, BLOCK_F)
    if block < second:
        write_tile(out_0_ptr, y_0_ptr, low_ptr, b_0_ptr, scale_0, block, N, size_0, rank_0, out_0, y_0, low_stride,
                   BLOCK_N, BLOCK_F, BLOCK_R)
    elif block < third:
        write_tile(out_1_ptr, y_1_ptr, low_ptr + rank_0, b_1_ptr, scale_1, block - second, N, size_1, rank_1, out_1,
                   y_1, low_stride, BLOCK_N, BLOCK_F, BLOCK_R)
    else:
        write_tile(out_2_ptr, y_2_ptr, low_ptr + rank_0 + rank_1, b_2_ptr, scale_2, block - third, N, size_2, rank_2,
                   out_2, y_2, low_stride, BLOCK_N, BLOCK_F, BLOCK_R)


def lora_up_triton(out: list[Tensor], y: list[Tensor], low: Tensor, b: list[Tensor], scales: list[float]) -> None:
    """Launch the kernel for up to MOST layers; other dtypes go to the reference."""
    if low.dtype not in TRITON_TYPES:
        return lora_up_ref(out, y, low, b, scales)
    sizes, ranks = [part.shape[1] for part in out], [factor.shape[1] for factor in b]
    numbers: list[list[Any]] = [scales, sizes, ranks, *([x.stride(0) for x in parts] for parts in (out, y))]
    launch = launch_rule(len(low), capability(low.device))
    blocks = sum(triton.cdiv(size, launch.constexprs["BLOCK_F"]) for size in sizes)
    lora_up_kernel[(blocks, triton.cdiv(len(low), launch.constexprs["BLOCK_N"]))](
        *(part for parts in (out, y, [factor.contiguous() for factor in b]) for part in (parts * MOST)[:MOST]),
        *(number for row in numbers for number in (row + [0] * MOST)[:MOST]), low, low.stride(0), len(low),
        **launch.options)


lora_up_op = custom_op("lora_up", lora_up_ref, lora_up_triton, mutates=("out",))


def lora_up(out: Sequence[Tensor], y: Sequence[Tensor], low: Tensor, b: Sequence[Tensor | None],
            scales: Sequence[float]) -> None:
    """Write all out_i, without autograd. A layer without LoRA has None in `b`, and no columns of `low`."""
    layers = [(*parts, low.new_empty(parts[0].shape[1], 0) if factor is None else factor, float(scale))
              for *parts, factor, scale in zip(out, y, b, scales, strict=True)
              if factor is not None or parts[0] is not parts[1]]
    for first in range(0, len(layers) if len(low) else 0, MOST):
        results, sources, factors, numbers = map(list, zip(*layers[first : first + MOST], strict=True))
        lora_up_op(results, sources, low, factors, numbers)
        done = sum(factor.shape[1] for factor in factors)
        low = low.narrow(1, done, low.shape[1] - done)


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    types = types_of(lora_up_kernel, dtype, scale_0="fp32", scale_1="fp32", scale_2="fp32")
    return [Variant(f"lora_up {rows}", lora_up_kernel, types, launch_rule(rows, capability)) for rows in (FEW, FEW + 1)]
