"""Frozen weights in NVFP4 (4-bit floats, e2m1, in blocks of 16 with a scale in 8 bits, e4m3), and their dequantization.

    weight[i, j] = e2m1(codes[i, j]) * (e4m3(scales[i, j // 16]) / divisors[i])

A byte of codes has an even column in its lower 4 bits, and the odd column after it in the upper 4. The divisor is the
global scale of a matrix, as compressed-tensors stores it (ModelOpt stores its reciprocal); each row has a copy, so that
matrices can lie side by side. Quotient and product are rounded to float32 in this order, as in compressed-tensors, and
then once to the result's dtype, so values are equal to its own. Activations are never quantized (W4A16).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import custom_op
from lowmem_grpo.kernels.few_rows import decode_op, takes_rows
from lowmem_grpo.kernels.few_rows_kernels import nvfp4_decode_triton
from lowmem_grpo.kernels.fp8 import E4M3, REFERENCE_ELEMENTS, decoded
from lowmem_grpo.kernels.frozen_weight import FrozenWeight
from lowmem_grpo.kernels.mxfp4 import e2m1_values
from lowmem_grpo.kernels.triton_utils import Launch, Variant, e2m1, e4m3, tl, triton, types_of

BLOCK = 16  # weights of a row that share a scale


@dataclass(frozen=True, eq=False)
class NVFP4Weight(FrozenWeight, kind="nvfp4"):
    """A frozen (out, in) weight in NVFP4. It may be several matrices, on top of each other in memory."""

    codes: Tensor  # (out, in / 2) uint8, contiguous
    scales: Tensor  # (out, in / 16) uint8, contiguous: the bits of float8_e4m3fn
    divisors: Tensor  # (out,) float32, contiguous
    dtype: torch.dtype  # of the values
    out_features: tuple[int, ...]  # rows of each matrix; their sum is out

    @classmethod
    def from_codes(cls, codes: Tensor, scales: Tensor, divisors: Tensor, dtype: torch.dtype) -> "NVFP4Weight":
        """Borrow codes, their scales (uint8 or float8_e4m3fn), and a divisor for each row or a single one, which is
        repeated. ValueError if they do not fit, or if a scale or divisor is not finite or a divisor is 0."""
        if codes.ndim != 2 or codes.dtype != torch.uint8 or 2 * codes.shape[1] % BLOCK or not codes.is_contiguous():
            raise ValueError(f"expected contiguous uint8 codes (out, in / 2), in a multiple of {BLOCK}; got "
                             f"{tuple(codes.shape)}, strides {codes.stride()}, {codes.dtype}")
        rows, wanted = len(codes), (len(codes), 2 * codes.shape[1] // BLOCK)
        fits = tuple(scales.shape) == wanted and scales.dtype in (torch.uint8, E4M3) and scales.is_contiguous()
        if not fits or divisors.dtype != torch.float32 or divisors.numel() not in (1, rows):
            raise ValueError(f"expected contiguous scales {wanted} in {E4M3}, and 1 or {rows} divisors in float32; got "
                             f"{tuple(scales.shape)} {scales.dtype}, and {divisors.numel()} {divisors.dtype}")
        bits = scales.view(torch.uint8)
        if ((bits & 127) == 127).any() or not (divisors.isfinite() & (divisors != 0)).all():
            raise ValueError("its scales are not finite, or its global scale is 0 or not finite")
        return cls(codes, bits, divisors.reshape(-1).expand(rows).contiguous(), dtype, (rows,))

    @classmethod
    def from_parts(
        cls, tensors: Sequence[Tensor], sizes: Sequence[int], features: Sequence[int], dtype: torch.dtype
    ) -> "NVFP4Weight":
        codes, scales, divisors = tensors
        if divisors.dtype != torch.float32:
            raise ValueError(f"the divisors were cast to {divisors.dtype}; load the model again, in the dtype wanted")
        return cls(codes, scales, divisors, dtype, tuple(features))

    @cached_property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]  # it is written to by nobody
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.codes, self.scales, self.divisors]

    @property
    def column_unit(self) -> int:
        return BLOCK

    def fill(self, out: Tensor, row: int = 0, column: int = 0) -> None:
        nvfp4_dequantize_op(out, *self.tensors, row, column)

    def rows(self, start: int, stop: int) -> "NVFP4Weight":
        codes, scales, divisors = (part[start:stop] for part in self.tensors)
        return NVFP4Weight(codes, scales, divisors, self.dtype, (stop - start,))

    def can_decode(self, x: Tensor) -> bool:
        """Return whether the kernel takes x (M, K): few 16-bit rows on CUDA, K % 64 == 0."""
        return takes_rows(x, self.out_features, self.kind) and x.shape[1] % 64 == 0


# Each thread turns 8 bytes into 16 values at a time.
DEQUANTIZE = Launch({"BLOCK_R": 16, "BYTES": 128}, num_warps=8, num_stages=1)


@triton.jit(do_not_specialize=["rows", "tiles", "first_row"])
def nvfp4_dequantize_kernel(
    out_ptr, codes_ptr, scales_ptr, divisors_ptr, row_bytes, width, first_byte, rows, tiles, first_row,
    BLOCK_R: tl.constexpr, BYTES: tl.constexpr,
):
    # a tile of BLOCK_R rows and BYTES bytes of codes, of the band's rows and width; 8 bytes share a scale
    row = (tl.program_id(0) // tiles) * BLOCK_R + tl.arange(0, BLOCK_R)
    byte = (tl.program_id(0) % tiles) * BYTES + tl.arange(0, BYTES)
    group = (tl.program_id(0) % tiles) * (BYTES // 8) + tl.arange(0, BYTES // 8)
    source = (first_row + row).to(tl.int64)[:, None] * row_bytes + first_byte
    in_rows = (row < rows)[:, None]
    codes = tl.load(codes_ptr + source + byte[None, :], mask=in_rows & (2 * byte < width)[None, :], other=0)
    inside = in_rows & (16 * group < width)[None, :]
    scales = e4m3(tl.load(scales_ptr + source // 8 + group[None, :], mask=inside, other=0), False)
    divisors = tl.load(divisors_ptr + first_row + row, mask=row < rows, other=1.0)
    scales = tl.div_rn(scales, divisors[:, None])[:, :, None]
    values = e2m1(tl.interleave(codes & 15, codes >> 4))
    values = tl.reshape(tl.reshape(values, (BLOCK_R, BYTES // 8, 16)) * scales, (BLOCK_R, 2 * BYTES))
    column = (tl.program_id(0) % tiles) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out_ptr + place, values.to(out_ptr.dtype.element_ty), mask=in_rows & (column < width)[None, :])


def nvfp4_dequantize_cpu(
    out: Tensor, codes: Tensor, scales: Tensor, divisors: Tensor, first_row: int, first_column: int
) -> None:
    """Write to `out` the rows and columns from the first ones on, a band of rows at a time."""
    rows, width = out.shape
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    step = max(1, REFERENCE_ELEMENTS // max(width, 1))
    for start in range(0, rows, step):
        part = slice(first_row + start, first_row + min(start + step, rows))
        values = e2m1_values(codes[part, first_column // 2 : (first_column + width) // 2], wide)
        scale = decoded(scales[part, first_column // BLOCK : (first_column + width) // BLOCK], wide)
        scale /= divisors[part, None]
        out[start : start + step] = values.view(*scale.shape, BLOCK).mul_(scale[:, :, None]).view(-1, width)


def nvfp4_dequantize_triton(
    out: Tensor, codes: Tensor, scales: Tensor, divisors: Tensor, first_row: int, first_column: int
) -> None:
    """Write to `out` the rows and columns from the first ones on, by the kernel."""
    (rows, width), (height, size) = out.shape, DEQUANTIZE.constexprs.values()
    tiles = triton.cdiv(width, 2 * size)
    if out.numel():
        nvfp4_dequantize_kernel[(tiles * triton.cdiv(rows, height),)](
            out, codes, scales, divisors, codes.shape[1], width, first_column // 2, rows, tiles, first_row,
            **DEQUANTIZE.options,
        )


nvfp4_dequantize_op = custom_op("nvfp4_dequantize", nvfp4_dequantize_cpu, nvfp4_dequantize_triton, mutates=("out",))
NVFP4Weight.decode_op = decode_op(NVFP4Weight, nvfp4_decode_triton)


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    types = types_of(nvfp4_dequantize_kernel, dtype, codes_ptr="*u8", scales_ptr="*u8", divisors_ptr="*fp32")
    return [Variant("nvfp4_dequantize", nvfp4_dequantize_kernel, types, DEQUANTIZE)]
