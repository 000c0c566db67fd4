"""Device functions shared by the kernels that read 4-bit weights: the code table, and the scale of a block.

Dequantizing looks up each weight in the table. A load from memory takes two integer instructions for a 64-bit address,
and the load itself. Here every lane of a warp holds one of the 16 entries, and a warp shuffle by the nibble fetches an
entry: one shift and one shuffle. The interpreter runs no inline assembly and loads from memory (SHUFFLE false).
"""

from collections.abc import Sequence

from torch import Tensor

from lowmem_grpo.kernels.triton_utils import tl, triton


@triton.jit
def lookup_high(packed, table_address):
    """Return code[packed >> 4] in float32: lane i of a warp holds code[i % 16], and the nibble names a lane."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 entry, lane;
        .reg .b64 address;
        mov.u32 lane, %laneid;
        and.b32 lane, lane, 15;
        mad.wide.u32 address, lane, 4, $5;
        ld.global.nc.b32 entry, [address];
        shr.u32 lane, $4, 4;
        shfl.sync.idx.b32 $0, entry, lane, 31, -1;
        shr.u32 lane, $4, 12;
        shfl.sync.idx.b32 $1, entry, lane, 31, -1;
        shr.u32 lane, $4, 20;
        shfl.sync.idx.b32 $2, entry, lane, 31, -1;
        shr.u32 lane, $4, 28;
        shfl.sync.idx.b32 $3, entry, lane, 31, -1;
        }""",
        "=&f,=&f,=&f,=&f,r,l,l,l,l", [packed, table_address], dtype=tl.float32, is_pure=True, pack=4,
    )


@triton.jit
def lookup_low(packed, table_address):
    """Return code[packed & 15] in float32. The shuffle also reads bit 4 of `packed`, which makes no difference: lanes i
    and i + 16 hold the same entry."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 entry, lane;
        .reg .b64 address;
        mov.u32 lane, %laneid;
        and.b32 lane, lane, 15;
        mad.wide.u32 address, lane, 4, $5;
        ld.global.nc.b32 entry, [address];
        shfl.sync.idx.b32 $0, entry, $4, 31, -1;
        shr.u32 lane, $4, 8;
        shfl.sync.idx.b32 $1, entry, lane, 31, -1;
        shr.u32 lane, $4, 16;
        shfl.sync.idx.b32 $2, entry, lane, 31, -1;
        shr.u32 lane, $4, 24;
        shfl.sync.idx.b32 $3, entry, lane, 31, -1;
        }""",
        "=&f,=&f,=&f,=&f,r,l,l,l,l", [packed, table_address], dtype=tl.float32, is_pure=True, pack=4,
    )


@triton.jit
def block_scale(
    byte, mask, absmax_ptr, nested_code_ptr, nested_absmax_ptr, offset_ptr, offset_stride, block_shift, first_block,
    nested_shift, NESTED: tl.constexpr, after=0,
):
    """Return the float32 scale of the block in which each `byte` lies, or of a block `after` it in its nested block. A
    block has 2**block_shift bytes."""
    block = byte >> block_shift
    if NESTED:
        group = (block + first_block) >> nested_shift
        code = tl.load(absmax_ptr + block + after, mask=mask, other=0).to(tl.int32)
        scale = tl.load(nested_code_ptr + code) * tl.load(nested_absmax_ptr + group, mask=mask, other=0.0)
        return scale + tl.load(offset_ptr + group * offset_stride, mask=mask, other=0.0)
    else:
        return tl.load(absmax_ptr + block + after, mask=mask, other=0.0)


def weight_arguments(tensors: Sequence[Tensor], sizes: Sequence[int]) -> tuple[list[Tensor], list[int]]:
    """Return a weight's tensors (the code table in place of missing nested ones) and the numbers for `block_scale`."""
    _, blocksize, nested_blocksize, first_block = sizes
    nested = tensors[3:] or [tensors[2]] * 3
    stride = nested[2].ndim if len(tensors) > 3 else 0  # one offset, or one for each nested block
    numbers = [stride, (blocksize // 2).bit_length() - 1, first_block, nested_blocksize.bit_length() - 1]
    return [*tensors[:3], *nested], numbers


def weight_types(nested: bool) -> dict[str, str]:
    floats = ("code_ptr", "nested_code_ptr", "nested_absmax_ptr", "offset_ptr")
    return {"packed_ptr": "*u8", "absmax_ptr": "*u8" if nested else "*fp32"} | dict.fromkeys(floats, "*fp32")
