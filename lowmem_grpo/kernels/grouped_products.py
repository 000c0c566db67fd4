"""Products of rows with the 4-bit weights of their experts (NF4 or MXFP4), decoded tile by tile on a card.

    forward    out_p = scale_p x_row(p) W_e(p)^T          x (N, K), W (E, O, K), out (S, O)
    backward   out_p = scale_p x_row(p) W_e(p)            x (N, O), out (S, K)

A place p is one of S pairs of a row of x and an expert e(p). Places are sorted by expert and cut into tiles of BLOCK_M
places (`Places`). No tile belongs to two experts, so there are at most S / BLOCK_M + E tiles: the shapes fix the grid,
nothing waits for the host, and programs beyond the last tile end at once. A program reads rows of x by index and writes
its results at their places, so that no rows are sorted or copied. Even and odd columns are multiplied apart, as in
few_rows_kernels.py. A step decodes 64 weights of a row, which are whole blocks: K must be a multiple of 64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem_grpo.kernels.frozen_weight import FrozenWeight
from lowmem_grpo.kernels.nf4_lookup import block_scale, lookup_high, lookup_low, weight_arguments, weight_types
from lowmem_grpo.kernels.triton_utils import (
    TRITON_TYPES,
    Launch,
    Variant,
    capability,
    e2m1,
    e8m0,
    tl,
    triton,
    types_of,
)

BYTES = 32  # decoded at a time from a row: a block of NF4, two of MXFP4
VARYING = ["places_a_row", "size_out", "row_bytes", "experts", "offset_stride", "block_shift", "first_block"]


@dataclass(frozen=True)
class Places:
    """The places (pairs of a row and an expert, numbered as in the flattened ids), by expert and cut into tiles."""

    order: Tensor  # (S,) int64: the places, by expert
    ends: Tensor  # (E + 1,) int64: where each expert's places begin in `order`, and the end of the last
    tiles: Tensor  # (E + 1,) int64: the same, counted in tiles
    most: int  # upper bound of the number of tiles
    block: int  # places of a tile

    @classmethod
    def from_ids(cls, ids: Tensor, experts: int) -> "Places":
        """Return `Places` for the flattened expert ids (S,). The host does not wait for the device."""
        chosen, order = ids.sort(stable=True)
        ends = torch.searchsorted(chosen, torch.arange(experts + 1, device=ids.device, dtype=ids.dtype))
        block = block_rows(len(ids), experts)
        tiles = torch.nn.functional.pad((ends.diff() + block - 1).div(block, rounding_mode="floor").cumsum(0), (1, 0))
        return cls(order, ends, tiles, min(len(ids), -(-len(ids) // block) + experts), block)


def block_rows(places: int, experts: int) -> int:
    return 64 if places >= 32 * experts else 16


def can_group(x: Tensor) -> bool:
    """Return whether the kernels can multiply rows x: on CUDA from sm_80 on. Before sm_80 (a T4) Triton uses no tensor
    cores, and the tiles do not fit in registers: there `routed_experts` decodes one expert after the other into a
    shared buffer, whatever the number of rows."""
    return x.is_cuda and x.dtype in TRITON_TYPES and capability(x.device) >= 80


def grouped_launch(block: int) -> Launch:
    return Launch({"BLOCK_M": block, "BLOCK_N": 64}, num_warps=8 if block > 16 else 4, num_stages=2)


@triton.jit
def tile_of(order_ptr, ends_ptr, tiles_ptr, experts, tile, BLOCK_M: tl.constexpr, STEPS: tl.constexpr):
    """Return a tile's expert, its places, and a mask of the places that exist. A binary search finds the last expert
    whose first tile is not after this one, which skips experts without tiles."""
    expert = tl.zeros((), tl.int64)
    for step in tl.static_range(STEPS):
        other = expert + (1 << (STEPS - 1 - step))
        inside = other < experts
        first = tl.load(tiles_ptr + other, mask=inside, other=0)
        expert = tl.where(inside & (first <= tile), other, expert)
    rank = (tile - tl.load(tiles_ptr + expert)) * BLOCK_M + tl.arange(0, BLOCK_M)
    position = tl.load(ends_ptr + expert) + rank
    there = position < tl.load(ends_ptr + expert + 1)
    return expert, tl.load(order_ptr + position, mask=there, other=0), there


@triton.jit
def decoded_once(values):
    """Return 16-bit values as they are. Since this seems to have effects, the compiler decodes each weight once and
    copies it to the warps that share it; else all of them would decode it (1424 instructions in place of 416)."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=2)


@triton.jit
def halves_of(
    source, inside, packed_ptr, absmax_ptr, code_ptr, nested_code_ptr, nested_absmax_ptr, offset_ptr, offset_stride,
    block_shift, first_block, nested_shift, dtype: tl.constexpr, BLOCK_M: tl.constexpr, BYTES: tl.constexpr,
    NESTED: tl.constexpr, MXFP4: tl.constexpr, SHUFFLE: tl.constexpr,
):
    """Return the weights of a tile's even and odd columns, (BLOCK_N, BYTES) each, from the bytes at `source`: of NF4 in
    float32, of MXFP4 in `dtype`. The scales of MXFP4 are at `absmax_ptr`; the arguments behind it are those of NF4."""
    packed = tl.load(packed_ptr + source[:, None] + tl.arange(0, BYTES)[None, :], mask=inside[:, None], other=0)
    if MXFP4:
        block = (source >> 4)[:, None] + tl.arange(0, BYTES // 16)[None, :]
        scales = e8m0(tl.load(absmax_ptr + block, mask=inside[:, None], other=0))[:, :, None]
        blocks = tl.reshape(packed, (packed.shape[0], BYTES // 16, 16))
        even = tl.reshape(e2m1(blocks & 15) * scales, packed.shape).to(dtype)
        odd = tl.reshape(e2m1(blocks >> 4) * scales, packed.shape).to(dtype)
        if SHUFFLE and BLOCK_M > 16 and dtype.primitive_bitwidth == 16:
            even = decoded_once(even)
            odd = decoded_once(odd)
        return even, odd
    else:
        scale = block_scale(
            source, inside, absmax_ptr, nested_code_ptr, nested_absmax_ptr, offset_ptr, offset_stride, block_shift,
            first_block, nested_shift, NESTED,
        )[:, None]
        if SHUFFLE:
            high = lookup_high(packed, code_ptr.to(tl.int64))
            low = lookup_low(packed, code_ptr.to(tl.int64))
        else:
            high = tl.load(code_ptr + (packed >> 4))
            low = tl.load(code_ptr + (packed & 15))
        return high * scale, low * scale


@triton.jit(do_not_specialize=VARYING)
def grouped_fwd_kernel(
    out_ptr, x_ptr, scale_ptr, order_ptr, ends_ptr, tiles_ptr, packed_ptr, absmax_ptr, code_ptr, nested_code_ptr,
    nested_absmax_ptr, offset_ptr, places_a_row, size_out, row_bytes, experts, offset_stride, block_shift,
    first_block, nested_shift,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BYTES: tl.constexpr, STEPS: tl.constexpr, SCALED: tl.constexpr,
    NESTED: tl.constexpr, MXFP4: tl.constexpr, SHUFFLE: tl.constexpr,
):
    tile = tl.program_id(0)
    if tile < tl.load(tiles_ptr + experts):
        dtype = x_ptr.dtype.element_ty
        expert, place, there = tile_of(order_ptr, ends_ptr, tiles_ptr, experts, tile, BLOCK_M, STEPS)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = n < size_out
        row_bytes = tl.multiple_of(row_bytes, 32)
        source = (expert * size_out + tl.where(inside, n, 0)) * row_bytes
        x_rows = x_ptr + (place // places_a_row)[:, None] * (2 * row_bytes) + 2 * tl.arange(0, BYTES)[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for begin in range(0, row_bytes, BYTES):
            even = tl.load(x_rows + 2 * begin, mask=there[:, None], other=0.0)
            odd = tl.load(x_rows + 2 * begin + 1, mask=there[:, None], other=0.0)
            left, right = halves_of(
                source + begin, inside, packed_ptr, absmax_ptr, code_ptr, nested_code_ptr, nested_absmax_ptr,
                offset_ptr, offset_stride, block_shift, first_block, nested_shift, dtype, BLOCK_M, BYTES, NESTED,
                MXFP4, SHUFFLE,
            )
            total = tl.dot(even, tl.trans(left.to(dtype)), total, input_precision="ieee")
            total = tl.dot(odd, tl.trans(right.to(dtype)), total, input_precision="ieee")
        if SCALED:
            total = total * tl.load(scale_ptr + place, mask=there, other=0.0)[:, None].to(tl.float32)
        target = out_ptr + place[:, None] * size_out + n[None, :]
        tl.store(target, total.to(dtype), mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=VARYING)
def grouped_bwd_kernel(
    out_ptr, x_ptr, scale_ptr, order_ptr, ends_ptr, tiles_ptr, packed_ptr, absmax_ptr, code_ptr, nested_code_ptr,
    nested_absmax_ptr, offset_ptr, places_a_row, size_out, row_bytes, experts, offset_stride, block_shift,
    first_block, nested_shift,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BYTES: tl.constexpr, STEPS: tl.constexpr, SCALED: tl.constexpr,
    NESTED: tl.constexpr, MXFP4: tl.constexpr, SHUFFLE: tl.constexpr,
):
    # one block of 64 columns; the sum runs over rows of the weight, BLOCK_N at a time
    tile = tl.program_id(0)
    if tile < tl.load(tiles_ptr + experts):
        dtype = x_ptr.dtype.element_ty
        expert, place, there = tile_of(order_ptr, ends_ptr, tiles_ptr, experts, tile, BLOCK_M, STEPS)
        byte = tl.program_id(1) * BYTES
        row_bytes = tl.multiple_of(row_bytes, 32)
        x_rows = x_ptr + (place // places_a_row)[:, None] * size_out
        even = tl.zeros((BLOCK_M, BYTES), tl.float32)
        odd = tl.zeros((BLOCK_M, BYTES), tl.float32)
        for begin in range(0, size_out, BLOCK_N):
            n = begin + tl.arange(0, BLOCK_N)
            inside = n < size_out
            source = (expert * size_out + tl.where(inside, n, 0)) * row_bytes + byte
            x = tl.load(x_rows + n[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            left, right = halves_of(
                source, inside, packed_ptr, absmax_ptr, code_ptr, nested_code_ptr, nested_absmax_ptr, offset_ptr,
                offset_stride, block_shift, first_block, nested_shift, dtype, BLOCK_M, BYTES, NESTED, MXFP4, SHUFFLE,
            )
            even = tl.dot(x, left.to(dtype), even, input_precision="ieee")
            odd = tl.dot(x, right.to(dtype), odd, input_precision="ieee")
        if SCALED:
            scale = tl.load(scale_ptr + place, mask=there, other=0.0)[:, None].to(tl.float32)
            even = even * scale
            odd = odd * scale
        target = out_ptr + place[:, None] * (2 * row_bytes) + 2 * byte + 2 * tl.arange(0, BYTES)[None, :]
        tl.store(target, even.to(dtype), mask=there[:, None])
        tl.store(target + 1, odd.to(dtype), mask=there[:, None])


def grouped_products(
    weight: FrozenWeight, x: Tensor, experts: int, places: Places, places_a_row: int = 1,
    scale: Tensor | None = None, back: bool = False,
) -> Tensor:
    """Return the products at all S places, in the dtype of x and without autograd: (S, O) for x (S / places_a_row, K),
    or with `back` (S, K) for x (S / places_a_row, O). scale (S,) is float32."""
    rows, columns, tensors = weight.shape[0] // experts, weight.shape[1], weight.tensors
    out = x.new_empty(len(places.order), columns if back else rows)
    launch = grouped_launch(places.block)
    width = 2 * BYTES if back else launch.constexprs["BLOCK_N"]
    mxfp4 = weight.kind == "mxfp4"
    pointers, numbers = ([*tensors, *4 * tensors[:1]], [0] * 4) if mxfp4 else weight_arguments(tensors, weight.sizes)
    kernel = grouped_bwd_kernel if back else grouped_fwd_kernel
    if out.numel():
        kernel[(places.most, triton.cdiv(out.shape[1], width))](
            out, x.contiguous(), x if scale is None else scale.contiguous(), places.order, places.ends, places.tiles,
            *pointers, places_a_row, rows, columns // 2, experts, *numbers, BYTES=BYTES, STEPS=steps_of(experts),
            SCALED=scale is not None, NESTED=len(tensors) > 3, MXFP4=mxfp4, SHUFFLE=x.is_cuda, **launch.options,
        )
    return out


def steps_of(experts: int) -> int:
    return max(1, (experts - 1).bit_length())


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    """Return a variant per direction, tile size, scale and form of the weights, for 128 experts; none before sm_80."""
    forms = {"nf4": (False, False), "nested": (True, False), "mxfp4": (False, True)}
    return [
        Variant(f"{name} block={block} scaled={scaled} {form}", kernel,
                types_of(kernel, dtype, order_ptr="*i64", ends_ptr="*i64", tiles_ptr="*i64",
                         **(dict.fromkeys(weight_types(False), "*u8") if mxfp4 else weight_types(nested)),
                         **({"scale_ptr": "*fp32"} if scaled else {})), grouped_launch(block),
                {"BYTES": BYTES, "STEPS": steps_of(128), "SCALED": scaled, "NESTED": nested, "MXFP4": mxfp4,
                 "SHUFFLE": True})
        for name, kernel in (("grouped_fwd", grouped_fwd_kernel), ("grouped_bwd", grouped_bwd_kernel))
        for block in (16, 64) for scaled in (False, True) for form, (nested, mxfp4) in forms.items()
    ] if capability >= 80 else []
