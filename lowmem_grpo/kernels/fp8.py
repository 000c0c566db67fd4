"""Frozen weights in FP8 (8-bit floats, e4m3): their quantization and dequantization.

    weight[i, j] = value(codes[i, j]) * scales[i // h, j // w]          blocks of (h, w) weights share a scale

A code has a sign, 4 bits of exponent (bias 7) and 3 of mantissa, no infinity, and NaN at 127 and 255; its largest value
is 448 (Micikevicius et al., arXiv 2209.05433, table 1). Scales by row are blocks of (1, in), one scale for all is a
block of (out, in), fine-grained FP8 (DeepSeek-V3, arXiv 2412.19437, section 3.3) has blocks of (128, 128); the last
block of a row or column may be smaller. Products are taken in float32 and rounded once.

Activations are never quantized: weights are decoded and multiplied in the dtype of x, so that all chips compute the
same. A code's bits are moved into a float16 (Triton has no e4m3 below sm_89), which gives the value / 256.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import check_tensors, custom_op
from lowmem_grpo.kernels.few_rows import decode_op, takes_rows
from lowmem_grpo.kernels.few_rows_kernels import STEP, fp8_decode_triton
from lowmem_grpo.kernels.frozen_weight import FrozenWeight
from lowmem_grpo.kernels.triton_utils import Launch, Variant, e4m3, flagged, tl, triton, types_of

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # largest value
REFERENCE_ELEMENTS = 2**22  # handled at a time on the CPU; temporaries take about 12 bytes each


@dataclass(frozen=True, eq=False)
class FP8Weight(FrozenWeight, kind="fp8"):
    """A frozen (out, in) weight in FP8. It may be several matrices, on top of each other in memory."""

    codes: Tensor  # (out, in) uint8, contiguous: the bits of float8_e4m3fn
    scales: Tensor  # (ceil(out / h), ceil(in / w)) float32, contiguous
    block: tuple[int, int]  # h, w
    dtype: torch.dtype  # the result's dtype in fp8_dequantize
    out_features: tuple[int, ...]  # rows of each matrix; their sum is out

    @classmethod
    def from_codes(cls, codes: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> "FP8Weight":
        """Borrow codes (out, in), uint8 or float8_e4m3fn, and their scales. ValueError if they do not fit."""
        if codes.ndim != 2 or codes.dtype not in (torch.uint8, E4M3) or not codes.is_contiguous():
            raise ValueError(f"expected contiguous codes (out, in) in uint8 or {E4M3}; got {tuple(codes.shape)}, "
                             f"strides {codes.stride()}, {codes.dtype}")
        wanted = scales_shape((codes.shape[0], codes.shape[1]), block)
        if tuple(scales.shape) != wanted or scales.dtype != torch.float32 or not scales.is_contiguous():
            raise ValueError(f"expected float32 scales {wanted} for {tuple(codes.shape)} codes in blocks of {block}; "
                             f"got {tuple(scales.shape)}, {scales.dtype}")
        return cls(codes.view(torch.uint8), scales, block, dtype, (codes.shape[0],))

    @classmethod
    def from_parts(
        cls, tensors: Sequence[Tensor], sizes: Sequence[int], features: Sequence[int], dtype: torch.dtype
    ) -> "FP8Weight":
        return cls(tensors[0], tensors[1], (sizes[0], sizes[1]), dtype, tuple(features))

    @cached_property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]  # it is written to by nobody
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.codes, self.scales]

    @property
    def sizes(self) -> list[int]:
        return [*self.block]

    @property
    def column_unit(self) -> int:
        """The width of a block of scales (16 if it spans all columns); bands are fastest in multiples of it."""
        return self.block[1] if self.block[1] < self.shape[1] else 16

    def fill(self, out: Tensor, row: int = 0, column: int = 0) -> None:
        fp8_dequantize_op(out, *self.tensors, *self.block, row, column)

    def can_decode(self, x: Tensor) -> bool:
        """Return whether the kernel takes x (M, K): few 16-bit rows on CUDA, K % 16 == 0, scales for 64 columns or
        more."""
        one_scale = self.scales.shape[1] == 1 or self.block[1] % STEP == 0
        return takes_rows(x, self.out_features, self.kind) and x.shape[1] % 16 == 0 and one_scale


def scales_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return -(shape[0] // -max(block[0], 1)), -(shape[1] // -max(block[1], 1))


def adjacent_fp8(weights: Sequence[FP8Weight], codes: Tensor, scales: Tensor) -> FP8Weight:
    """Return several weights as one; `codes` and `scales` are theirs, concatenated by rows. ValueError if the weights
    differ in width, blocks or dtype, or if one before the last ends within a block."""
    first = weights[0]
    for number, weight in enumerate(weights):
        want, got = ((w.shape[1], w.block, w.dtype) for w in (first, weight))
        if want != got:
            raise ValueError(f"weight {number} does not fit: (in, block, dtype) is {got}, and {want} in weight 0")
        if number < len(weights) - 1 and weight.shape[0] % first.block[0]:
            raise ValueError(f"weight {number}, {weight.shape}, does not end at a multiple of {first.block[0]} rows")
    return FP8Weight(codes, scales, first.block, first.dtype, tuple(weight.shape[0] for weight in weights))


@torch.no_grad()
def fp8_quantize(weight: Tensor, block: tuple[int, int] | None = None) -> FP8Weight:
    """Quantize a weight (out, in) of any floating dtype to FP8: each scale makes the largest magnitude of its block
    448. With `block` None, each row has one scale. NaN stays NaN."""
    check_tensors(weight=weight)
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(f"expected a weight (out, in) of a floating dtype; got {tuple(weight.shape)} {weight.dtype}")
    rows, columns = weight.shape
    sizes = (1, max(columns, 1)) if block is None else block if isinstance(block, Sequence) else (block,)
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes if block is not None):
        raise ValueError(f"block is {block!r}; it must be (rows, columns), both whole numbers above 0, or None, which "
                         "is a scale for each row")
    block = sizes[0], sizes[1]
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(scales_shape((rows, columns), block), device=weight.device)
    height, step = block[0], max(1, REFERENCE_ELEMENTS // max(columns, 1) // block[0]) * block[0]
    for start in range(0, rows if columns else 0, step):
        values, groups = weight[start : start + step].float(), slice(start // height, (start + step - 1) // height + 1)
        largest = block_maxima(values.abs(), block)
        scales[groups] = torch.where(largest == 0, 1.0, largest / LARGEST)
        values = values / spread_scales(scales[groups], block, values.shape)
        codes[start : start + step] = values.clamp_(-LARGEST, LARGEST).to(E4M3).view(torch.uint8)
    return FP8Weight(codes, scales, block, weight.dtype, (rows,))


def block_maxima(values: Tensor, block: tuple[int, int]) -> Tensor:
    by_rows = torch.stack([part.amax(0) for part in values.split(block[0])]) if block[0] > 1 else values
    if block[1] >= values.shape[1]:
        return by_rows.amax(1, keepdim=True)
    return torch.stack([part.amax(1) for part in by_rows.split(block[1], 1)], 1)


def spread_scales(scales: Tensor, block: tuple[int, int], shape: Sequence[int]) -> Tensor:
    """Return `scales` repeated to `shape`, one per weight, or (rows, 1) if they are by row."""
    spread = scales.repeat_interleave(block[0], 0)[: shape[0]] if block[0] > 1 else scales
    return spread if scales.shape[1] == 1 else spread.repeat_interleave(block[1], 1)[:, : shape[1]]


def fp8_dequantize_ref(weight: FP8Weight) -> Tensor:
    """Return the weight (out, in) in weight.dtype, computed by plain torch in float32 (float64 for float64)."""
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    scales = spread_scales(weight.scales, weight.block, weight.shape)
    return (weight.codes.view(E4M3).to(wide) * scales.to(wide)).to(weight.dtype)


# Each thread turns 16 bytes into 16 values at a time; blocks of 128 columns are whole in a tile.
DEQUANTIZE = Launch({"BLOCK_R": 32, "BLOCK_C": 128}, num_warps=8, num_stages=1)


@triton.jit(do_not_specialize=["rows", "tiles", "first_row", "block_rows", "scale_columns"])
def fp8_dequantize_kernel(
    out_ptr, codes_ptr, scales_ptr, width, columns, first_column, block_columns, rows, tiles, first_row, block_rows,
    scale_columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, ONE_SCALE: tl.constexpr,
):
    # a tile of BLOCK_R rows and BLOCK_C columns of the band; ONE_SCALE: each row of a tile has one scale
    row = (tl.program_id(0) // tiles) * BLOCK_R + tl.arange(0, BLOCK_R)
    begin = (tl.program_id(0) % tiles) * BLOCK_C
    column = begin + tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    source_row, source_column = first_row + row, first_column + column
    source = source_row.to(tl.int64)[:, None] * columns + source_column[None, :]
    scale_row = (source_row // block_rows) * scale_columns
    if ONE_SCALE:
        scale = tl.load(scales_ptr + scale_row + (first_column + begin) // block_columns, mask=row < rows, other=0.0)
        scale = scale[:, None]
    else:
        scale = tl.load(
            scales_ptr + scale_row[:, None] + (source_column // block_columns)[None, :], mask=inside, other=0.0
        )
    values = e4m3(tl.load(codes_ptr + source, mask=inside, other=0), False) * scale
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out_ptr + place, values.to(out_ptr.dtype.element_ty), mask=inside)


def fp8_dequantize_cpu(
    out: Tensor, codes: Tensor, scales: Tensor, block_rows: int, block_columns: int, first_row: int, first_column: int,
) -> None:
    rows, width = out.shape
    columns = torch.arange(first_column, first_column + width, device=codes.device) // max(block_columns, 1)
    step = max(1, REFERENCE_ELEMENTS // max(width, 1))
    for start in range(0, rows, step):
        part = slice(first_row + start, first_row + min(start + step, rows))
        groups = torch.arange(part.start, part.stop, device=codes.device) // max(block_rows, 1)
        scale = scales[groups]
        scale = scale if scale.shape[1] == 1 else scale[:, columns]
        wide = torch.float64 if out.dtype == torch.float64 else torch.float32
        out[start : start + step] = decoded(codes[part, first_column : first_column + width], wide).mul_(scale)


def decoded(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each code's (uint8) value in float32 or float64, far faster on the CPU than torch's own conversion."""
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)  # the sign in the upper two bits
    bits.bitwise_and_(~(1 << 14)).masked_fill_((codes & 127) == 127, 0x7E00)  # NaN
    return bits.view(torch.float16).to(dtype).mul_(256.0)


def fp8_dequantize_triton(
    out: Tensor, codes: Tensor, scales: Tensor, block_rows: int, block_columns: int, first_row: int, first_column: int,
) -> None:
    (rows, width), (height, wide) = out.shape, DEQUANTIZE.constexprs.values()
    tiles = triton.cdiv(width, wide)
    aligned = first_column % block_columns == 0 and block_columns % wide == 0 if width else True
    if out.numel():
        fp8_dequantize_kernel[(tiles * triton.cdiv(rows, height),)](
            out, codes, scales, width, codes.shape[1], first_column, block_columns, rows, tiles, first_row, block_rows,
            scales.shape[1], ONE_SCALE=aligned or scales.shape[1] == 1, **DEQUANTIZE.options,
        )


fp8_dequantize_op = custom_op("fp8_dequantize", fp8_dequantize_cpu, fp8_dequantize_triton, mutates=("out",))


def fp8_dequantize(weight: FP8Weight, out: Tensor | None = None) -> Tensor:
    """Return the weight (out, in) in its dtype, or in `out` (contiguous, any floating dtype) if it is given."""
    if not isinstance(weight, FP8Weight):
        raise ValueError(f"expected an FP8Weight, as fp8_quantize makes it; got a {type(weight).__name__}")
    return weight.dequantized(out)


FP8Weight.decode_op = decode_op(FP8Weight, fp8_decode_triton)


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    types = types_of(fp8_dequantize_kernel, dtype, codes_ptr="*u8", scales_ptr="*fp32")
    return flagged("fp8_dequantize", fp8_dequantize_kernel, types, DEQUANTIZE, ("ONE_SCALE",))
