"""The 4-bit weights of bitsandbytes, borrowed rather than copied, and their dequantization.

    weight[i] = code[nibble[i]] * scale[i // blocksize]          i: position in the flattened (out, in) weight

Two nibbles share a byte of `packed`, the earlier one in the high half. NF4 and FP4 differ only in the 16 values of
`code`. `scale` is the float32 `absmax` of each block; with double quantization `absmax` holds 8-bit codes instead:

    scale[b] = nested_code[absmax[b]] * nested_absmax[b // nested_blocksize] + offset

Products are taken in float32 and rounded once, bit for bit as in bitsandbytes' own dequantization (QLoRA, Dettmers et
al. 2023, describes the format).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import custom_op
from lowmem_grpo.kernels.few_rows import decode_op, takes_rows
from lowmem_grpo.kernels.few_rows_kernels import nf4_decode_triton
from lowmem_grpo.kernels.frozen_weight import FrozenWeight
from lowmem_grpo.kernels.grouped_products import can_group, grouped_products
from lowmem_grpo.kernels.nf4_lookup import block_scale, lookup_high, lookup_low, weight_arguments, weight_types
from lowmem_grpo.kernels.triton_utils import Launch, Variant, tl, triton, types_of

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # as in bitsandbytes
REFERENCE_ELEMENTS = 2**22  # dequantized at a time on the CPU; temporaries take about 16 bytes each


@dataclass(frozen=True, eq=False)
class NF4Weight(FrozenWeight, kind="nf4"):
    """A frozen (out, in) weight in 4 bits. If `adjacent` made it, it is several matrices on top of each other."""

    packed: Tensor  # (ceil(out * in / 2),) uint8
    absmax: Tensor  # (blocks,) float32, or uint8 with double quantization
    code: Tensor  # (16,) float32
    shape: tuple[int, int]  # out, in
    blocksize: int
    dtype: torch.dtype  # the result's dtype in nf4_dequantize
    out_features: tuple[int, ...]  # rows of each matrix; their sum is shape[0]
    nested_code: Tensor | None = None  # (256,) float32; None without double quantization
    nested_absmax: Tensor | None = None  # (nested blocks,) float32
    offset: Tensor | None = None  # () or (nested blocks,) float32
    nested_blocksize: int = 256
    first_block: int = 0  # in a band of rows: blocks before it in its first nested block
    grouped = grouped_products

    @classmethod
    def from_bitsandbytes(cls, param: Any) -> "NF4Weight":
        """Borrow the tensors of a quantized Params4bit, so that later changes of the tensors are seen here."""
        state = getattr(param, "quant_state", None)
        if isinstance(param, torch.nn.Module):
            raise ValueError(f"expected a Params4bit; got {type(param).__name__}: give its weight")
        if state is None or getattr(state, "packing_format_for_cpu", False):
            why = "it has been repacked for the CPU's matrix units" if state else "it has no quant_state"
            raise ValueError(f"expected a Params4bit as bitsandbytes quantized it; got {type(param).__name__}: {why}")
        if len(state.shape) != 2 or state.blocksize not in BLOCKSIZES:
            raise ValueError(f"expected a matrix, blocks of {BLOCKSIZES}; got {tuple(state.shape)}, {state.blocksize}")
        nested = state.state2
        scales = [state.absmax] if nested is None else [nested.absmax, nested.code, state.offset]
        if wrong := [part.dtype for part in scales if part.dtype != torch.float32]:
            raise ValueError(f"expected float32 scales; got {wrong}: convert them once, as in state.absmax.float()")
        return cls(
            param.data.detach().reshape(-1).view(torch.uint8), state.absmax, state.code, tuple(state.shape),
            state.blocksize, state.dtype, (state.shape[0],), **{} if nested is None else {
                "nested_code": nested.code, "nested_absmax": nested.absmax, "offset": state.offset,
                "nested_blocksize": nested.blocksize,
            },
        )

    @classmethod
    def adjacent(cls, params: Sequence[Any]) -> "NF4Weight":
        """Join several Params4bit into one weight, of which their storage becomes views. ValueError, with nothing
        changed, unless they agree in `in`, block sizes, code and dtype, and each but the last ends where a block ends
        (with double quantization: where a nested block ends)."""
        check_adjacent(weights := [cls.from_bitsandbytes(param) for param in params])
        first = weights[0]
        names = ["packed", "absmax"] + ([] if first.nested_code is None else ["nested_absmax", "offset"])
        parts = {name: [weight.part(name) for weight in weights] for name in names}
        joined: dict[str, Any] = {name: torch.cat(tensors) for name, tensors in parts.items()}
        views = {name: joined[name].split([len(part) for part in parts[name]]) for name in names}
        for number, param in enumerate(params):
            state, own = param.quant_state, {name: views[name][number] for name in names}
            param.data = own["packed"].view(param.data.dtype).view(param.data.shape)
            state.absmax = own["absmax"].view(state.absmax.shape)
            if "offset" in own:
                state.state2.absmax, state.offset = own["nested_absmax"], own["offset"][0]
        features = tuple(weight.shape[0] for weight in weights)
        return replace(first, **joined, shape=(sum(features), first.shape[1]), out_features=features)

    @classmethod
    def from_parts(
        cls, tensors: Sequence[Tensor], sizes: Sequence[int], features: Sequence[int], dtype: torch.dtype
    ) -> "NF4Weight":
        (packed, absmax, code, *nested), (columns, blocksize, nested_blocksize, first_block) = tensors, sizes
        nested_code, nested_absmax, offset = nested or (None, None, None)
        return cls(packed, absmax, code, (sum(features), columns), blocksize, dtype, tuple(features), nested_code,
                   nested_absmax, offset, nested_blocksize, first_block)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the operations take; three, or six with double quantization."""
        parts = (self.packed, self.absmax, self.code, self.nested_code, self.nested_absmax, self.offset)
        return [part for part in parts if part is not None]

    @property
    def sizes(self) -> list[int]:
        return [self.shape[1], self.blocksize, self.nested_blocksize, self.first_block]

    @property
    def row_unit(self) -> int:
        """The smallest number of rows that ends where a block ends."""
        return self.blocksize // math.gcd(self.shape[1], self.blocksize)

    @property
    def column_unit(self) -> int:
        """The smallest number of columns that can be dequantized alone; all columns if blocks span rows."""
        return self.blocksize if self.shape[1] % self.blocksize == 0 else max(self.shape[1], 1)

    def fill(self, out: Tensor, row: int = 0, column: int = 0) -> None:
        part = self if row == 0 and out.shape[0] == self.shape[0] else self.rows(row, row + out.shape[0])
        nf4_dequantize_op(out, part.tensors, part.sizes, column)

    @property
    def whole_blocks(self) -> bool:
        """Whether each row has whole blocks of 64 weights or more."""
        return self.blocksize >= 64 and self.shape[1] % self.blocksize == 0

    def can_decode(self, x: Tensor) -> bool:
        return self.whole_blocks and takes_rows(x, self.out_features, self.kind)

    def can_group(self, x: Tensor) -> bool:
        return self.whole_blocks and can_group(x)

    def part(self, name: str) -> Tensor:
        """Return a tensor of this weight by name; the offset is expanded to one for each nested block."""
        tensor = getattr(self, name)
        return tensor.expand_as(self.nested_absmax) if name == "offset" else tensor

    def rows(self, start: int, stop: int) -> "NF4Weight":
        """Return rows `start` to `stop` as a view; ValueError unless a block begins at `start`."""
        columns, size = self.shape[1], self.blocksize
        if not 0 <= start <= stop <= self.shape[0] or start * columns % size:
            raise ValueError(f"rows {start} to {stop} of {self.shape} in blocks of {size} do not begin with a block")
        blocks = slice(start * columns // size, -(stop * columns // -size))
        band = replace(self, packed=self.packed[start * columns // 2 : (stop * columns + 1) // 2],
                       absmax=self.absmax[blocks], shape=(stop - start, columns), out_features=(stop - start,))
        if self.nested_absmax is None or self.offset is None:
            return band
        before = self.first_block + blocks.start
        groups = slice(before // self.nested_blocksize, -((self.first_block + blocks.stop) // -self.nested_blocksize))
        return replace(band, first_block=before % self.nested_blocksize, nested_absmax=self.nested_absmax[groups],
                       offset=self.offset[groups] if self.offset.ndim else self.offset)

    def scales(self) -> Tensor:
        if self.nested_code is None or self.nested_absmax is None or self.offset is None:
            return self.absmax
        group = (torch.arange(len(self.absmax), device=self.absmax.device) + self.first_block) // self.nested_blocksize
        return self.nested_code[self.absmax.int()] * self.nested_absmax[group] + self.part("offset")[group]


def check_adjacent(weights: Sequence[NF4Weight]) -> None:
    """Raise ValueError with the number of the first weight that cannot be joined with the others."""
    if not weights:
        raise ValueError("expected at least one weight; got none")
    first = weights[0]
    for number, weight in enumerate(weights):
        want, got = ((w.shape[1], w.blocksize, w.dtype, w.absmax.dtype, w.nested_blocksize) for w in (first, weight))
        if want != got:
            raise ValueError(f"weight {number} does not fit: (in, blocksize, dtype, dtype of absmax, nested blocksize) "
                             f"is {got}, and {want} in weight 0")
        tables = [table for w in (first, weight) for table in (w.code, w.nested_code) if table is not None]
        if not all(map(torch.equal, tables[: len(tables) // 2], tables[len(tables) // 2 :])):
            raise ValueError(f"weight {number} has other code tables than weight 0")
        unit = weight.blocksize * (1 if weight.nested_code is None else weight.nested_blocksize)
        if number < len(weights) - 1 and weight.shape[0] * weight.shape[1] % unit:
            raise ValueError(f"weight {number}, {weight.shape}, does not end at a multiple of {unit} elements")


def nf4_dequantize_ref(weight: NF4Weight) -> Tensor:
    """Return the weight (out, in) in weight.dtype, by plain torch."""
    pairs = torch.stack((weight.code.repeat_interleave(16), weight.code.repeat(16)), -1)  # (256, 2): values of a byte
    count, size, scales = weight.shape[0] * weight.shape[1], weight.blocksize, weight.scales()
    values = pairs.index_select(0, weight.packed.int()).flatten()[:count]
    values[: count // size * size].view(-1, size).mul_(scales[: count // size, None])
    values[count // size * size :].mul_(scales[count // size :])
    return values.view(weight.shape).to(weight.dtype)


# Each thread turns 4 bytes into 8 values, 16 bytes, at a time.
DEQUANTIZE = Launch({"WORDS": 128, "STEPS": 4}, num_warps=4, num_stages=1)


@triton.jit(do_not_specialize=["tiles", "offset_stride", "block_shift", "first_block"])
def nf4_dequantize_kernel(
    out_ptr, packed_ptr, absmax_ptr, code_ptr, nested_code_ptr, nested_absmax_ptr, offset_ptr,
    width, row_bytes, first_byte, tiles, offset_stride, block_shift, first_block, nested_shift,
    WORDS: tl.constexpr, STEPS: tl.constexpr, RAGGED: tl.constexpr, NESTED: tl.constexpr, SHUFFLE: tl.constexpr,
):
    # each row of `width` outputs comes from the bytes at row * row_bytes + first_byte; a word is 4 bytes, 8 elements
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = (tl.program_id(0) % tiles).to(tl.int64) * (WORDS * STEPS)
    byte = tl.arange(0, 4)[None, :]
    element = tl.arange(0, 8)[None, :]
    for step in tl.static_range(STEPS):
        word = tile + step * WORDS + tl.arange(0, WORDS)
        source = row * row_bytes + first_byte + word * 4
        whole = word * 8 < width
        scale = block_scale(
            source, whole, absmax_ptr, nested_code_ptr, nested_absmax_ptr, offset_ptr, offset_stride, block_shift,
            first_block, nested_shift, NESTED,
        )[:, None]
        inside = (word[:, None] * 8 + 2 * byte < width) if RAGGED else whole[:, None]
        packed = tl.load(packed_ptr + source[:, None] + byte, mask=inside, other=0)
        if SHUFFLE:
            high = lookup_high(packed, code_ptr.to(tl.int64))
            low = lookup_low(packed, code_ptr.to(tl.int64))
        else:
            high = tl.load(code_ptr + (packed >> 4))
            low = tl.load(code_ptr + (packed & 15))
        values = tl.interleave(high * scale, low * scale).to(out_ptr.dtype.element_ty)
        position = word[:, None] * 8 + element
        tl.store(out_ptr + row * width + position, values, mask=(position < width) if RAGGED else whole[:, None])


def nf4_dequantize_cpu(out: Tensor, tensors: list[Tensor], sizes: list[int], first_column: int) -> None:
    """Write the columns from `first_column` on, of all rows, to `out`, a band of rows at a time."""
    rows, width = out.shape
    weight = NF4Weight.from_parts(tensors, sizes, [rows], out.dtype)
    unit = weight.row_unit
    step = max(1, REFERENCE_ELEMENTS // max(weight.shape[1], 1) // unit) * unit
    for start in range(0, rows, step):
        band = nf4_dequantize_ref(weight.rows(start, min(start + step, rows)))
        out[start : start + step] = band[:, first_column : first_column + width]


def nf4_dequantize_triton(out: Tensor, tensors: list[Tensor], sizes: list[int], first_column: int) -> None:
    """Write the columns from `first_column` on, of all rows, to `out` by the kernel."""
    rows, width = (1, out.numel()) if out.shape[1] == sizes[0] else out.shape
    tiles = triton.cdiv(width, 8 * DEQUANTIZE.constexprs["WORDS"] * DEQUANTIZE.constexprs["STEPS"])
    pointers, numbers = weight_arguments(tensors, sizes)
    if out.numel():
        nf4_dequantize_kernel[(rows * tiles,)](
            out, *pointers, width, sizes[0] // 2, first_column // 2, tiles, *numbers, RAGGED=width % 8 != 0,
            NESTED=len(tensors) > 3, SHUFFLE=out.is_cuda, **DEQUANTIZE.options,
        )


nf4_dequantize_op = custom_op("nf4_dequantize", nf4_dequantize_cpu, nf4_dequantize_triton, mutates=("out",))


def nf4_dequantize(weight: Any, out: Tensor | None = None) -> Tensor:
    """Return an NF4Weight or Params4bit as values (out, in) in its dtype, or in `out` (contiguous, any float dtype)."""
    return (weight if isinstance(weight, NF4Weight) else NF4Weight.from_bitsandbytes(weight)).dequantized(out)


NF4Weight.decode_op = decode_op(NF4Weight, nf4_decode_triton)


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    return [
        Variant(f"nf4_dequantize nested={nested} ragged={ragged}", nf4_dequantize_kernel,
                types_of(nf4_dequantize_kernel, dtype, **weight_types(nested)), DEQUANTIZE,
                {"NESTED": nested, "RAGGED": ragged, "SHUFFLE": True})
        for nested in (False, True) for ragged in (False, True)
    ]
