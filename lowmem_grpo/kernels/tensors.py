"""Tensors that kernels take: checks that arguments are tensors and numbers; and matrix products of 16-bit tensors with
a 32-bit result, without a 32-bit copy of the larger one."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import custom_op

MIN_BAND = 64  # columns upcast at a time on the CPU, at least


def check_tensors(optional: Mapping[str, Any] | None = None, **needed: Any) -> None:
    """Raise ValueError for an argument that is no tensor; an optional one may be None."""
    for name, value in {**{n: v for n, v in (optional or {}).items() if v is not None}, **needed}.items():
        if not isinstance(value, Tensor):
            fix = ": give its weight, and bias" if isinstance(value, torch.nn.Module) else ""
            raise ValueError(f"{name} is a {type(value).__name__}; it must be a tensor{fix}")


def check_numbers(**numbers: Any) -> None:
    """Raise ValueError for an argument that is no number, or a tensor that is not one number or requires a gradient."""
    for name, value in numbers.items():
        if isinstance(value, Tensor) and (value.requires_grad or value.numel() != 1):
            raise ValueError(f"{name} is a tensor {tuple(value.shape)}, requires_grad={value.requires_grad}; it must "
                             "be one number, which gets no gradient: give a float, or scale the tensors by it")
        if not isinstance(value, (Real, Tensor, torch.SymFloat)) and getattr(value, "ndim", None) != 0:
            raise ValueError(f"{name} is {value!r}; it must be a number")


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul_fp32(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return left (M, K) @ right (K, N) in float32 (float64 for float64), written to `out` (M, N) if it is given. On
    CUDA the product reads 16-bit operands and writes its float32 accumulator. The CPU has no such product: columns of
    `right` are upcast in bands no larger than the result."""
    dtype = accumulator_dtype(left.dtype)
    if out is None:
        out = torch.empty(left.shape[0], right.shape[1], dtype=dtype, device=left.device)
    if left.dtype == dtype:
        return torch.mm(left, right, out=out)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype, out=out)
    upcast_matmul(left, right, out)
    return out


def matmul_in_bands(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write left @ right to `out`, a band of upcast columns at a time."""
    wide = left.to(out.dtype)
    band = max(MIN_BAND, out.numel() // max(left.shape[1], 1))
    for start in range(0, right.shape[1], band):
        columns = slice(start, start + band)
        torch.mm(wide, right[:, columns].to(out.dtype), out=out[:, columns])


upcast_matmul = custom_op("upcast_matmul", matmul_in_bands, mutates=("out",))


def addmm_fp32(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add left (M, K) @ right (K, N) to total (M, N) in place, in its dtype: float32, or float64 for float64."""
    if left.dtype == total.dtype:
        return total.addmm_(left, right)
    if left.is_cuda:
        return torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    return total.add_(matmul_fp32(left, right))
