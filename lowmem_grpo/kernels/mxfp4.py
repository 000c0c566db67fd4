"""Frozen weights in MXFP4 (blocks of 32 numbers in 4 bits): their quantization and dequantization.

    weight[i, j] = value(code[i, j]) * 2^(scales[i, j // 32] - 127)

Two codes share a byte, the even column in the low half. A code is an E2M1 number: a sign, 2 bits of exponent (bias 1)
and 1 of mantissa, which gives 0, 0.5, 1, 1.5, 2, 3, 4 or 6 and no NaN. A scale is an E8M0 number, a power of two; 255
is NaN, which is refused (OCP Microscaling Formats, MX, version 1.0, sections 5.3, 5.4 and 6.3). Products are taken in
float32 and rounded once: in bfloat16 every weight is exact, in float16 those beyond 65504 are infinite.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import check_tensors, custom_op
from lowmem_grpo.kernels.frozen_weight import FrozenWeight
from lowmem_grpo.kernels.grouped_products import can_group, grouped_products
from lowmem_grpo.kernels.triton_utils import Launch, Variant, e2m1, e8m0, tl, triton, types_of

BLOCK = 32  # weights of a scale
LARGEST_SCALE = 254  # 2^127
REFERENCE_ELEMENTS = 2**20  # handled at a time on the CPU
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; 8 more is the negative number
WORDS = {2: torch.int32, 4: torch.int64, 8: torch.complex128}  # of two numbers, by the bytes of one


@dataclass(frozen=True, eq=False)
class MXFP4Weight(FrozenWeight, kind="mxfp4"):
    """A frozen (out, in) weight in MXFP4. It may be several matrices, on top of each other in memory."""

    codes: Tensor  # (out, in / 2) uint8, contiguous
    scales: Tensor  # (out, in / 32) uint8, contiguous
    dtype: torch.dtype  # the result's dtype in mxfp4_dequantize
    out_features: tuple[int, ...]  # rows of each matrix; their sum is out
    grouped = grouped_products

    @classmethod
    def from_codes(cls, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> "MXFP4Weight":
        """Borrow codes, (out, in / 2) or in blocks (out, in / 32, 16), and their scales (out, in / 32), all uint8.
        ValueError if they do not fit, or if a scale is NaN."""
        shape, flat = tuple(codes.shape), codes.flatten(1) if codes.ndim == 3 else codes
        if flat.ndim != 2 or flat.shape[1] % 16 or shape[2:] not in ((), (16,)):
            raise ValueError("expected codes (out, in / 2), or blocks of 32 codes (out, in / 32, 16), of whole blocks; "
                             f"got {shape}")
        for name, part, wanted in (("codes", codes, shape), ("scales", scales, (shape[0], flat.shape[1] // 16))):
            if tuple(part.shape) != wanted or part.dtype != torch.uint8 or not part.is_contiguous():
                raise ValueError(f"expected contiguous {name} {wanted} in uint8 for codes {shape}; got "
                                 f"{tuple(part.shape)}, strides {part.stride()}, {part.dtype}")
        if wrong := int((scales > LARGEST_SCALE).sum()):
            raise ValueError(f"{wrong} of {scales.numel()} scales are NaN (255): the checkpoint is damaged")
        return cls(flat, scales, dtype, shape[:1])

    @classmethod
    def from_parts(
        cls, tensors: Sequence[Tensor], sizes: Sequence[int], features: Sequence[int], dtype: torch.dtype
    ) -> "MXFP4Weight":
        return cls(tensors[0], tensors[1], dtype, tuple(features))

    @cached_property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]  # it is written to by nobody
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.codes, self.scales]

    @property
    def column_unit(self) -> int:
        return BLOCK

    def fill(self, out: Tensor, row: int = 0, column: int = 0) -> None:
        mxfp4_dequantize_op(out, *self.tensors, row, column)

    def can_group(self, x: Tensor) -> bool:
        return self.shape[1] % 64 == 0 and can_group(x)

    def rows(self, start: int, stop: int) -> "MXFP4Weight":
        return MXFP4Weight(self.codes[start:stop], self.scales[start:stop], self.dtype, (stop - start,))


def e2m1_values(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values (..., 2 n) of the E2M1 codes in bytes (..., n), the low half of a byte first."""
    values = torch.tensor(E2M1, dtype=dtype, device=codes.device)
    values = torch.cat((values, -values))
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)  # (256, 2): the values of a byte
    words = pairs.view(WORDS[pairs.itemsize]).view(-1)  # far faster on the CPU than pairs
    return words.index_select(0, codes.reshape(-1).int()).view(dtype).view(*codes.shape[:-1], 2 * codes.shape[-1])


def e8m0_values(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2^(scale - 127) of each byte. The least one, 2^-127, is below float32's normal numbers."""
    exponents = scales.int()
    return torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32).to(dtype)


@torch.no_grad()
def mxfp4_quantize(weight: Tensor) -> MXFP4Weight:
    """Quantize a weight (out, in) of any floating dtype to MXFP4, rounding to the nearest number, or to the even code
    between two. Of the two powers of two that could be a block's scale, the one is taken that represents its largest
    magnitude better (the smaller one if both do so equally well), which is then 3.5 to 7 times the scale. ValueError
    unless all numbers are finite and the rows are whole blocks of 32."""
    check_tensors(weight=weight)
    if weight.ndim != 2 or weight.shape[1] % BLOCK or not weight.is_floating_point():
        raise ValueError(f"expected a weight (out, in) of a floating dtype, in a multiple of {BLOCK}; got "
                         f"{tuple(weight.shape)} {weight.dtype}")
    if not weight.isfinite().all():
        raise ValueError("expected finite weights, since MXFP4 has neither NaN nor infinity; got some")
    rows, columns = weight.shape
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, columns // BLOCK, dtype=torch.uint8, device=weight.device)
    step = max(1, REFERENCE_ELEMENTS // max(columns, 1))
    for start in range(0, rows if columns else 0, step):
        values = weight[start : start + step].float().unflatten(1, (-1, BLOCK))
        scales[start : start + step] = scale = best_scales(values.abs().amax(-1))
        whole = e2m1_codes(values / e8m0_values(scale, torch.float32)[..., None]).flatten(1)
        codes[start : start + step] = whole[:, ::2] | whole[:, 1::2] << 4
    return MXFP4Weight(codes, scales, weight.dtype, (rows,))


def best_scales(largest: Tensor) -> Tensor:
    """Return the scales of blocks from their largest magnitudes: 7 and more times a power of two rounds up to 8."""
    mantissa, exponent = torch.frexp(largest)  # mantissa from 0.5 on, below 1
    found = exponent + 124 + (mantissa > 7 / 8).int()
    return torch.where(largest == 0, 0, found).clamp_(0, LARGEST_SCALE).to(torch.uint8)


def e2m1_codes(values: Tensor) -> Tensor:
    """Return the code of the E2M1 number that is nearest to each value; beyond 6 it is that of 6."""
    numbers = torch.tensor(E2M1, device=values.device)
    middle = (numbers[1:] + numbers[:-1]) / 2
    middle[1::2] = middle[1::2].nextafter(middle.new_zeros(()))  # the even code is above
    return torch.bucketize(values.abs(), middle).to(torch.uint8) | torch.signbit(values).to(torch.uint8) << 3


def mxfp4_dequantize_ref(weight: MXFP4Weight) -> Tensor:
    """Return the weight (out, in) in weight.dtype, computed by plain torch in float32 (float64 for float64)."""
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    nibbles = torch.stack((weight.codes & 15, weight.codes >> 4), -1).flatten(1).long()
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=wide, device=weight.device)[nibbles]
    return torch.ldexp(values, weight.scales.int().repeat_interleave(BLOCK, 1) - 127).to(weight.dtype)


# Each thread turns 4 bytes into 8 values, 16 bytes, at a time.
DEQUANTIZE = Launch({"WORDS": 128, "STEPS": 4}, num_warps=4, num_stages=1)


@triton.jit(do_not_specialize=["tiles", "scales_ptr"])
def mxfp4_dequantize_kernel(
    out_ptr, codes_ptr, scales_ptr, width, row_bytes, first_byte, tiles, WORDS: tl.constexpr, STEPS: tl.constexpr,
):
    # each row of `width` outputs comes from the bytes at row * row_bytes + first_byte; a word is 4 bytes, 8 numbers
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = (tl.program_id(0) % tiles).to(tl.int64) * (WORDS * STEPS)
    byte = tl.arange(0, 4)[None, :]
    number = tl.arange(0, 8)[None, :]
    for step in tl.static_range(STEPS):
        word = tile + step * WORDS + tl.arange(0, WORDS)
        inside = word * 8 < width
        source = row * row_bytes + first_byte + word * 4
        codes = tl.load(codes_ptr + source[:, None] + byte, mask=inside[:, None], other=0)
        scale = e8m0(tl.load(scales_ptr + (source >> 4), mask=inside, other=0))[:, None]
        values = tl.interleave(e2m1(codes & 15) * scale, e2m1(codes >> 4) * scale).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * width + word[:, None] * 8 + number, values, mask=inside[:, None])


def mxfp4_dequantize_cpu(out: Tensor, codes: Tensor, scales: Tensor, first_row: int, first_column: int) -> None:
    """Write to `out` the rows and columns from the first ones on, a band of rows at a time."""
    rows, width = out.shape
    wide = torch.float32 if out.dtype == torch.float16 else out.dtype  # bfloat16 has the exponents of the scales
    step = max(1, REFERENCE_ELEMENTS // max(width, 1))
    for start in range(0, rows, step):
        part = slice(first_row + start, first_row + min(start + step, rows))
        values = e2m1_values(codes[part, first_column // 2 :][:, : width // 2], wide)
        scale = e8m0_values(scales[part, first_column // BLOCK :][:, : width // BLOCK], wide)
        values.unflatten(1, (width // BLOCK, BLOCK)).mul_(scale[..., None])
        out[start : start + step] = values


def mxfp4_dequantize_triton(out: Tensor, codes: Tensor, scales: Tensor, first_row: int, first_column: int) -> None:
    """Write to `out` the rows and columns from the first ones on, by the kernel."""
    whole, row_bytes = out.shape[1] == 2 * codes.shape[1], codes.shape[1]
    rows, width = (1, out.numel()) if whole else out.shape
    tiles = triton.cdiv(width, 8 * DEQUANTIZE.constexprs["WORDS"] * DEQUANTIZE.constexprs["STEPS"])
    if out.numel():
        mxfp4_dequantize_kernel[(rows * tiles,)](
            out, codes[first_row:], scales[first_row:], width, row_bytes, first_column // 2, tiles,
            **DEQUANTIZE.options,
        )


mxfp4_dequantize_op = custom_op(
    "mxfp4_dequantize", mxfp4_dequantize_cpu, mxfp4_dequantize_triton, mutates=("out",))


def mxfp4_dequantize(weight: MXFP4Weight, out: Tensor | None = None) -> Tensor:
    """Return the weight (out, in) in its dtype, or in `out` (contiguous, any floating dtype) if it is given."""
    if not isinstance(weight, MXFP4Weight):
        raise ValueError(f"expected an MXFP4Weight, as mxfp4_quantize makes it; got a {type(weight).__name__}")
    return weight.dequantized(out)


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    types = types_of(mxfp4_dequantize_kernel, dtype, codes_ptr="*u8", scales_ptr="*u8")
    return [Variant("mxfp4_dequantize", mxfp4_dequantize_kernel, types, DEQUANTIZE)]
