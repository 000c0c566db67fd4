"""Products with frozen weights (tensors, or codes in NF4 or FP8), and the frozen weights of experts in one buffer.

    y = x W^T + bias;   dx = dy W

The arithmetic is in the dtype of x. Codes are dequantized into it band by band, in one buffer of BAND_BYTES: bands of
rows of W for y, and of columns for dx, so that no sum runs over bands.
"""

import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import check_tensors, once_differentiable
from lowmem_grpo.kernels.few_rows import given_adapters
from lowmem_grpo.kernels.few_rows_kernels import can_decode_fp8, can_decode_nf4, fp8_decode_op, nf4_decode_op
from lowmem_grpo.kernels.fp8 import FP8Weight
from lowmem_grpo.kernels.nf4 import NF4Weight

BAND_BYTES = 64 * 2**20  # dequantized at a time

QuantizedWeight = NF4Weight | FP8Weight
FrozenWeight = Tensor | QuantizedWeight


@dataclass(eq=False)
class WideWeights:
    """A cache of dequantized weights. While the context variable `WIDE` holds one, products with more than `few` rows
    of x dequantize a weight once and reuse it until `held` is cleared."""

    few: int
    held: dict[tuple[int, tuple[int, int]], tuple[QuantizedWeight, Tensor]] = field(default_factory=dict)

    def dequantized(self, weight: QuantizedWeight, like: Tensor) -> Tensor:
        key = weight.tensors[0].data_ptr(), weight.shape
        if key not in self.held:
            wide = like.new_empty(weight.shape)
            weight.fill(wide)
            self.held[key] = weight, wide  # holding the weight keeps its address, the key, from being reused
        return self.held[key][1]


WIDE: ContextVar[WideWeights | None] = ContextVar("wide weights", default=None)


def wide_weights() -> WideWeights | None:
    """Return the context's `WideWeights`; None while torch compiles, which cannot read a context variable."""
    return None if torch.compiler.is_compiling() else WIDE.get()


def can_decode(x: Tensor, weight: QuantizedWeight) -> bool:
    """Return whether x (M, K) has so few rows that a kernel multiplies x with the codes directly."""
    wide = wide_weights()
    if wide is not None and len(x) > wide.few:
        return False
    return can_decode_nf4(x, weight) if isinstance(weight, NF4Weight) else can_decode_fp8(x, weight)


def decode(
    x: Tensor, weight: QuantizedWeight, xa: Tensor | None = None, lora_b: Tensor | None = None,
    scale: float | Tensor = 1.0, bias: Tensor | None = None,
) -> Tensor:
    """Return x W^T + scale * xa_s B^T + bias (M, N) by a kernel of few_rows_kernels.py, without autograd, where
    `can_decode` is True. x (M, K), xa (M, S * R), lora_b (N, R) and bias (N,) have one dtype."""
    operation = nf4_decode_op if isinstance(weight, NF4Weight) else fp8_decode_op
    return operation(x.contiguous(), weight.tensors, weight.sizes, list(weight.out_features),
                     *given_adapters(xa, lora_b, scale, bias))


@torch.no_grad()
def project(x: Tensor, weight: FrozenWeight, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias without autograd: x (..., in), weight (out, in) -> (..., out) in x.dtype."""
    if isinstance(weight, Tensor) and not torch.is_autocast_enabled(x.device.type):
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)
    rows = x.reshape(-1, x.shape[-1])
    with torch.autocast(x.device.type, enabled=False):
        if isinstance(weight, Tensor):
            y = torch.nn.functional.linear(rows, weight.to(x.dtype), bias)
        elif can_decode(rows, weight):
            y = decode(rows, weight, bias=bias)
        else:
            (y,) = project_bands(rows, weight, weight.shape[:1], [bias])
    return y.view(*x.shape[:-1], weight.shape[0])


@torch.no_grad()
def project_each(x: Tensor, weight: QuantizedWeight, biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Return x W_i^T + bias_i (N, out_i) for x (N, in) and each matrix W_i of a weight, without autograd."""
    with torch.autocast(x.device.type, enabled=False):
        if not can_decode(x, weight):
            return project_bands(x, weight, weight.out_features, biases)
        has_bias = any(bias is not None for bias in biases)
        pairs = zip(biases, weight.out_features, strict=True) if has_bias else ()
        parts = [x.new_zeros(size) if bias is None else bias for bias, size in pairs]
        return list(decode(x, weight, bias=torch.cat(parts) if has_bias else None).split(weight.out_features, 1))


def project_bands(
    x: Tensor, weight: QuantizedWeight, features: Sequence[int], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """Compute `project_each` by bands of dequantized rows; `features` holds the rows of each matrix."""
    outputs: dict[int, Tensor] = {}
    for start, band in row_bands(weight, x):
        for number, columns, rows in crossings(features, start, start + len(band)):
            bias, part = biases[number], band[rows].T
            if part.shape[1] == features[number]:  # the whole matrix
                outputs[number] = x @ part if bias is None else torch.addmm(bias, x, part)
                continue
            if number not in outputs:
                outputs[number] = x.new_empty(x.shape[0], features[number])
            y = outputs[number][:, columns]
            if bias is not None:
                y.copy_(bias[columns])
            y.addmm_(x, part, beta=int(bias is not None))
    return [outputs[number] if number in outputs else x.new_empty(x.shape[0], 0) for number in range(len(features))]


def crossings(features: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield each matrix with rows in the band [start, stop): its number, and the rows' slices in matrix and band."""
    first = 0
    for number, size in enumerate(features):
        begin, end = max(start, first), min(stop, first + size)
        if begin < end:
            yield number, slice(begin - first, end - first), slice(begin - start, end - start)
        first += size


@torch.no_grad()
def project_back(grad: Tensor, weight: FrozenWeight) -> Tensor:
    """Return grad W without autograd: grad (..., out), weight (out, in) -> (..., in) in grad.dtype."""
    rows = grad.reshape(-1, grad.shape[-1])
    if isinstance(weight, Tensor):
        with torch.autocast(grad.device.type, enabled=False):
            x = rows @ weight.to(grad.dtype)
    else:
        x = project_back_each([rows], weight, weight.shape[:1])
    return x.view(*grad.shape[:-1], weight.shape[1])


@torch.no_grad()
def project_back_each(
    grads: Sequence[Tensor | None], weight: QuantizedWeight, features: Sequence[int] | None = None
) -> Tensor:
    """Return the sum of grad_i W_i (N, in) over the matrices, without autograd: grad_i (N, out_i), not all None."""
    ends = list(accumulate(weight.out_features if features is None else features))
    pairs = [(grad, slice(end - grad.shape[1], end)) for grad, end in zip(grads, ends, strict=True) if grad is not None]
    like = pairs[0][0]
    x = like.new_empty(like.shape[0], weight.shape[1])
    with torch.autocast(like.device.type, enabled=False):
        for start, band in column_bands(weight, like):
            columns = x[:, start : start + band.shape[1]]
            for number, (grad, rows) in enumerate(pairs):
                columns.addmm_(grad, band[rows], beta=min(number, 1))
    return x


def row_bands(weight: QuantizedWeight, like: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, dequantized rows) in like's dtype, band by band in one buffer, or all rows from `WIDE`."""
    wide = wide_weights()
    if wide is not None and len(like) > wide.few:
        yield 0, wide.dequantized(weight, like)
        return
    rows, columns = weight.shape
    step = even_step(rows, columns * like.element_size(), weight.row_unit)
    buffer = like.new_empty(min(step, rows) * columns)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        band = buffer[: count * columns].view(count, columns)
        weight.fill(band, row=start)
        yield start, band


def column_bands(weight: QuantizedWeight, like: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (first column, dequantized columns), band by band. If NF4 blocks span rows, one band has all columns."""
    rows, columns = weight.shape
    step = even_step(columns, rows * like.element_size(), weight.column_unit)
    buffer = like.new_empty(rows * min(step, columns))
    for start in range(0, columns, step):
        width = min(step, columns - start)
        band = buffer[: rows * width].view(rows, width)
        weight.fill(band, column=start)
        yield start, band


def even_step(count: int, size: int, unit: int) -> int:
    """Return the rows of a band, a multiple of `unit`, that cuts `count` rows of `size` bytes about evenly."""
    bands = max(1, math.ceil(count * size / BAND_BYTES))
    return max(1, math.ceil(count / bands / unit)) * unit


def frozen_weight(weight: Any) -> FrozenWeight:
    """Return bitsandbytes' Params4bit as an NF4Weight, and other weights unchanged; ValueError for anything else."""
    if hasattr(weight, "quant_state"):
        return NF4Weight.from_bitsandbytes(weight)
    if not isinstance(weight, NF4Weight | FP8Weight):
        check_tensors(weight=weight)
    return weight


def check_frozen(weight: FrozenWeight) -> None:
    """Raise ValueError for a weight that requires a gradient, since it would get none."""
    if isinstance(weight, Tensor) and weight.requires_grad and torch.is_grad_enabled():
        raise ValueError("the weights are frozen: call weight.requires_grad_(False) and train LoRA")


def frozen_linear(x: Tensor, weight: FrozenWeight, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias (..., out) for x (..., in) of any floating dtype. Codes are decoded to that dtype, and
    decoded again in the backward pass, for which nothing is saved. A bias may get a gradient, the weight none.
    ValueError if shapes do not fit."""
    weight = frozen_weight(weight)
    check_tensors({"bias": bias}, x=x)
    check_frozen(weight)
    shapes = x.shape[-1:], tuple(weight.shape), None if bias is None else tuple(bias.shape)
    if shapes[0] != weight.shape[1:] or shapes[2] not in (None, shapes[1][:1]) or not x.is_floating_point():
        raise ValueError("expected x (..., in) of a floating dtype, weight (out, in), bias (out,); got "
                         f"{tuple(x.shape)} {x.dtype}, {shapes[1:]}")
    return FrozenLinearFunction.apply(x, weight, bias)


class FrozenLinearFunction(torch.autograd.Function):
    """dx = dy W;  dbias = sum of dy over rows."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.weight = weight
        with torch.autocast(x.device.type, enabled=False):
            return project(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        needs_x, _, needs_bias = ctx.needs_input_grad
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if needs_bias else None
        return project_back(grad, ctx.weight) if needs_x else None, None, grad_bias


@dataclass(frozen=True, eq=False)
class FrozenStack:
    """The frozen weights of E experts in one buffer: E matrices (out, in) on top of each other, in NF4 or unquantized.
    ValueError if E does not divide the rows, or if a block of NF4 weights belongs to two experts."""

    weight: Tensor | NF4Weight  # (E * out, in)
    experts: int  # E

    def __post_init__(self) -> None:
        if len(self.weight.shape) != 2 or self.experts < 1 or self.weight.shape[0] % self.experts:
            raise ValueError(f"expected a weight (E * out, in) of E = {self.experts} experts; got shape "
                             f"{tuple(self.weight.shape)}")
        _, rows, columns = self.shape
        if isinstance(self.weight, NF4Weight) and rows * columns % self.weight.blocksize:
            raise ValueError(f"an expert of {rows} x {columns} weights does not end where a block of "
                             f"{self.weight.blocksize} ends, so that its neighbour would share a scale with it. Hold "
                             "such experts in 16 bits")

    @classmethod
    def from_weights(cls, weights: Tensor) -> "FrozenStack":
        """Borrow weights (E, out, in) of a floating dtype; ValueError unless they are contiguous."""
        if weights.ndim != 3 or not weights.is_contiguous():
            raise ValueError(f"expected contiguous weights (E, out, in); got {tuple(weights.shape)}, strides "
                             f"{weights.stride()}")
        return cls(weights.detach().flatten(0, 1), weights.shape[0])

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.experts, self.weight.shape[0] // self.experts, self.weight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight] if isinstance(self.weight, Tensor) else self.weight.tensors

    @property
    def sizes(self) -> list[int]:
        nf4 = () if isinstance(self.weight, Tensor) else self.weight.sizes
        return [self.experts, self.weight.shape[0], *nf4]

    @classmethod
    def from_parts(cls, tensors: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype) -> "FrozenStack":
        experts, rows, *others = sizes
        if not others:
            return cls(tensors[0], experts)
        return cls(NF4Weight.from_parts(tensors, others, [rows], dtype), experts)

    def expert(self, number: int) -> Tensor | NF4Weight:
        """Return the weight (out, in) of one expert, a view."""
        rows = self.shape[1]
        part = slice(number * rows, (number + 1) * rows)
        return self.weight[part] if isinstance(self.weight, Tensor) else self.weight.rows(part.start, part.stop)

    def fill(self, out: Tensor, number: int) -> Tensor:
        """Return an expert's weight (out, in) in the dtype of `out`: a view if it is stored so, else `out`, filled."""
        part = self.expert(number)
        if isinstance(part, Tensor):
            return part if part.dtype == out.dtype else out.copy_(part)
        part.fill(out)
        return out
