"""x W^T for a few rows of x and W in NF4, FP8 or NVFP4, with LoRA and bias in the same kernel (see few_rows.py).

NF4: a byte holds an even and an odd column. The high nibbles are multiplied with the even columns of x and the low ones
with the odd columns, in two products, so that nothing is interleaved. Measured on an H100 in a CUDA graph, for 4096 x
14336 and 4096 x 4096: 37 and 14 us for 1 to 8 rows (dense: 44 and 16), 76 and 26 us for 64 (dense: 47 and 15). Since
then a step of the loop reads up to four blocks of 64, which no card has measured (`few_rows.narrow_launch`).

FP8: scales are by row, one for all, or by blocks that a tile of 64 columns does not cross (128 x 128; groups of 64 or
more). With finer blocks the weight is dequantized first. From sm_89 on the card converts codes itself; before sm_89,
the bits are moved (fp8.py).

NVFP4: the low nibbles are the even columns. A nibble's bits in a float16 are its value / 2^14 (`triton_utils.e2m1`),
by which the scale of its 8 bytes is multiplied. No card has measured it.
"""

import torch
from torch import Tensor

from lowmem_grpo.kernels import few_rows
from lowmem_grpo.kernels.few_rows import VARYING, finish
from lowmem_grpo.kernels.nf4_lookup import block_scale, lookup_high, lookup_low, weight_arguments, weight_types
from lowmem_grpo.kernels.triton_utils import Variant, capability, e4m3, tl, triton

STEP = 64  # columns of FP8 codes that each share of K reads at a time
NATIVE = 89  # compute capability from which Triton has the type e4m3


@triton.jit(do_not_specialize=[*VARYING, "offset_stride", "block_shift", "first_block"])
def nf4_decode_kernel(
    out_ptr, x_ptr, packed_ptr, absmax_ptr, code_ptr, nested_code_ptr, nested_absmax_ptr, offset_ptr, row_bytes,
    offset_stride, block_shift, first_block, nested_shift, xa_ptr, lora_b_ptr, bias_ptr, scale_ptr, scale, tensor_scale,
    m_size, n_size, rank, matrices, second, third, bias_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, BYTES: tl.constexpr, NESTED: tl.constexpr,
    SHUFFLE: tl.constexpr,
):
    dtype = x_ptr.dtype.element_ty
    row_bytes = tl.multiple_of(row_bytes, 32)  # whole blocks of 64
    first_row = tl.program_id(1) * BLOCK_M
    out_ptr += first_row * n_size
    x_ptr += first_row * (2 * row_bytes)
    xa_ptr += first_row * matrices * rank
    m_size -= first_row
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    split = tl.arange(0, SPLIT)
    n_inside = n < n_size
    row = tl.where(n_inside, n, 0).to(tl.int64) * row_bytes
    packed_rows = packed_ptr + row[None, :, None] + tl.arange(0, BYTES)[None, None, :]
    m_row = tl.where(m < m_size, m, 0)  # a row is read twice rather than masked, and its result is not stored
    x_rows = x_ptr + m_row[None, :, None] * (2 * row_bytes) + tl.arange(0, 2 * BYTES)[None, None, :]
    if SHUFFLE:
        # The address of the table, as if it were loaded (the mask is never true, as m_size >= 0). The compiler converts
        # layouts where values are loaded, so here it converts the packed bytes; with an address that is not loaded it
        # would convert the weights, which are four times larger, through shared memory.
        zero = tl.arange(0, 1)
        somewhere = code_ptr.to(tl.pointer_type(tl.int64)) + zero
        table = tl.load(somewhere, mask=zero + m_size < 0, other=code_ptr.to(tl.int64))[None, :, None]
    after = ((32 * tl.arange(0, BYTES // 32)) >> block_shift)[None, None, :]
    total = tl.zeros((SPLIT, BLOCK_N, BLOCK_M), tl.float32)
    for step in range(0, tl.cdiv(row_bytes, SPLIT * BYTES)):
        byte = ((step * SPLIT + split) * BYTES)[:, None, None]
        inside = byte < row_bytes
        packed = tl.load(packed_rows + byte, mask=inside, other=0)
        x = tl.load(x_rows + 2 * byte, mask=inside, other=0.0)
        even, odd = tl.split(tl.reshape(x, (SPLIT, BLOCK_M, BYTES, 2)))
        scales = block_scale(
            row[None, :, None] + byte, inside, absmax_ptr, nested_code_ptr, nested_absmax_ptr, offset_ptr,
            offset_stride, block_shift, first_block, nested_shift, NESTED, after,
        )[:, :, :, None]
        if SHUFFLE:
            high = lookup_high(packed, table)
            low = lookup_low(packed, table)
        else:
            high = tl.load(code_ptr + (packed >> 4))
            low = tl.load(code_ptr + (packed & 15))
        high = tl.reshape(high, (SPLIT, BLOCK_N, BYTES // 32, 32)) * scales
        low = tl.reshape(low, (SPLIT, BLOCK_N, BYTES // 32, 32)) * scales
        high = tl.reshape(high.to(dtype), (SPLIT, BLOCK_N, BYTES))
        low = tl.reshape(low.to(dtype), (SPLIT, BLOCK_N, BYTES))
        total = tl.dot(high, tl.trans(even, (0, 2, 1)), total, input_precision="ieee")
        total = tl.dot(low, tl.trans(odd, (0, 2, 1)), total, input_precision="ieee")
    finish(
        out_ptr, total, n, m, split, xa_ptr, lora_b_ptr, bias_ptr, scale_ptr, scale, tensor_scale, m_size, n_size, rank,
        matrices, second, third, bias_size, SPLIT,
    )


def nf4_decode_triton(
    x: Tensor, tensors: list[Tensor], sizes: list[int], features: list[int], xa: Tensor | None, lora_b: Tensor | None,
    scale: float, scale_tensor: Tensor | None, bias: Tensor | None,
) -> Tensor:
    """Launch the kernel; x, xa (M, S * R) and lora_b (N, R) are contiguous."""
    rows, outputs = x.shape[0], sum(features)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    launch = few_rows.narrow_launch(rows, outputs, x.shape[1], capability(x.device))
    pointers, numbers = weight_arguments(tensors, sizes)
    nf4_decode_kernel[few_rows.grid(rows, outputs, launch)](
        out, x, *pointers, sizes[0] // 2, *numbers,
        *few_rows.finish_arguments(x, tensors[2], features, xa, lora_b, scale, scale_tensor, bias),
        NESTED=len(tensors) > 3, SHUFFLE=x.is_cuda, **launch.options,
    )
    return out


def nf4_variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    choices = few_rows.launches(capability) if capability < 80 else few_rows.narrow_launches(capability)
    return [
        few_rows.variant(f"nf4_decode {name} nested={nested}", nf4_decode_kernel, weight_types(nested), dtype, launch,
                         NESTED=nested, SHUFFLE=True)
        for name, launch in choices.items() for nested in (False, True)
    ]


@triton.jit(do_not_specialize=[*VARYING, "chunks", "block_rows", "block_columns", "scale_columns"])
def fp8_decode_kernel(
    out_ptr, x_ptr, codes_ptr, scales_ptr, chunks, block_rows, block_columns, scale_columns, xa_ptr, lora_b_ptr,
    bias_ptr, scale_ptr, scale, tensor_scale, m_size, n_size, rank, matrices, second, third, bias_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, BYTES: tl.constexpr, BY_ROW: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # BY_ROW: each row of W has one scale
    dtype = x_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    split = tl.arange(0, SPLIT)
    k = tl.arange(0, BYTES)
    columns = chunks * 16  # so the compiler knows that rows begin at multiples of 16 bytes
    first_row = tl.program_id(1) * BLOCK_M
    out_ptr += first_row * n_size
    x_ptr += first_row * columns
    xa_ptr += first_row * matrices * rank
    m_size -= first_row
    row = tl.where(n < n_size, n, 0)
    code_rows = codes_ptr + row.to(tl.int64)[None, :, None] * columns + k[None, None, :]
    x_rows = x_ptr + m[None, :, None] * columns + k[None, None, :]
    scale_rows = scales_ptr + (row // block_rows).to(tl.int64) * scale_columns
    if BY_ROW:
        scales = tl.load(scale_rows)[None, :, None]
    total = tl.zeros((SPLIT, BLOCK_N, BLOCK_M), tl.float32)
    for step in range(0, tl.cdiv(columns, SPLIT * BYTES)):
        first = (step * SPLIT + split) * BYTES
        inside = (first[:, None] + k[None, :] < columns)[:, None, :]
        codes = tl.load(code_rows + first[:, None, None], mask=inside, other=0)
        x = tl.load(x_rows + first[:, None, None], mask=inside & (m < m_size)[None, :, None], other=0.0)
        if not BY_ROW:
            scales = tl.load(
                scale_rows[None, :] + (first // block_columns)[:, None], mask=(first < columns)[:, None], other=0.0
            )[:, :, None]
        weights = (e4m3(codes, NATIVE) * scales).to(dtype)
        total = tl.dot(weights, tl.trans(x, (0, 2, 1)), total, input_precision="ieee")
    finish(
        out_ptr, total, n, m, split, xa_ptr, lora_b_ptr, bias_ptr, scale_ptr, scale, tensor_scale, m_size, n_size, rank,
        matrices, second, third, bias_size, SPLIT,
    )


def fp8_decode_triton(
    x: Tensor, tensors: list[Tensor], sizes: list[int], features: list[int], xa: Tensor | None, lora_b: Tensor | None,
    scale: float, scale_tensor: Tensor | None, bias: Tensor | None,
) -> Tensor:
    """Launch the kernel; x, xa (M, S * R) and lora_b (N, R) are contiguous and of one dtype."""
    rows, outputs, chip, (codes, scales) = x.shape[0], sum(features), capability(x.device), tensors
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    launch = few_rows.decode_launch(rows, outputs, chip, STEP)
    fp8_decode_kernel[few_rows.grid(rows, outputs, launch)](
        out, x, codes, scales, codes.shape[1] // 16, *sizes, scales.shape[1],
        *few_rows.finish_arguments(x, scales, features, xa, lora_b, scale, scale_tensor, bias),
        BY_ROW=scales.shape[1] == 1, NATIVE=chip >= NATIVE, **launch.options,
    )
    return out


def fp8_variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    types = {"codes_ptr": "*u8", "scales_ptr": "*fp32"}
    return [
        few_rows.variant(f"fp8_decode {name} by_row={by_row}", fp8_decode_kernel, types, dtype, launch, BY_ROW=by_row,
                         NATIVE=capability >= NATIVE)
        for name, launch in few_rows.launches(capability, STEP).items() for by_row in (True, False)
    ]


@triton.jit(do_not_specialize=VARYING)
def nvfp4_decode_kernel(
    out_ptr, x_ptr, codes_ptr, scales_ptr, divisors_ptr, row_bytes, xa_ptr, lora_b_ptr, bias_ptr, scale_ptr, scale,
    tensor_scale, m_size, n_size, rank, matrices, second, third, bias_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, BYTES: tl.constexpr, NATIVE: tl.constexpr,
):
    dtype = x_ptr.dtype.element_ty
    row_bytes = tl.multiple_of(row_bytes, 32)  # as `can_decode` demands
    first_row = tl.program_id(1) * BLOCK_M
    out_ptr += first_row * n_size
    x_ptr += first_row * (2 * row_bytes)
    xa_ptr += first_row * matrices * rank
    m_size -= first_row
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    split = tl.arange(0, SPLIT)
    n_row = tl.where(n < n_size, n, 0)
    row = n_row.to(tl.int64)[None, :, None] * row_bytes
    divisors = tl.load(divisors_ptr + n_row)[None, :, None]
    code_rows = codes_ptr + row + tl.arange(0, BYTES)[None, None, :]
    scale_rows = scales_ptr + row // 8 + tl.arange(0, BYTES // 8)[None, None, :]
    m_row = tl.where(m < m_size, m, 0)  # a row is read twice rather than masked, and its result is not stored
    x_rows = x_ptr + m_row[None, :, None] * (2 * row_bytes) + tl.arange(0, 2 * BYTES)[None, None, :]
    total = tl.zeros((SPLIT, BLOCK_N, BLOCK_M), tl.float32)
    for step in range(0, tl.cdiv(row_bytes, SPLIT * BYTES)):
        byte = ((step * SPLIT + split) * BYTES)[:, None, None]
        inside = byte < row_bytes
        codes = tl.load(code_rows + byte, mask=inside, other=0)
        x = tl.load(x_rows + 2 * byte, mask=inside, other=0.0)
        even, odd = tl.split(tl.reshape(x, (SPLIT, BLOCK_M, BYTES, 2)))
        scales = e4m3(tl.load(scale_rows + byte // 8, mask=inside, other=0), NATIVE)
        scales = tl.div_rn(scales, divisors)[:, :, :, None] * 16384.0
        bits = tl.reshape(codes.to(tl.uint16), (SPLIT, BLOCK_N, BYTES // 8, 8))
        low = (((bits & 7) << 9) | ((bits & 8) << 12)).to(tl.float16, bitcast=True).to(tl.float32) * scales
        high = (((bits & 112) << 5) | ((bits & 128) << 8)).to(tl.float16, bitcast=True).to(tl.float32) * scales
        low = tl.reshape(low.to(dtype), (SPLIT, BLOCK_N, BYTES))
        high = tl.reshape(high.to(dtype), (SPLIT, BLOCK_N, BYTES))
        total = tl.dot(low, tl.trans(even, (0, 2, 1)), total, input_precision="ieee")
        total = tl.dot(high, tl.trans(odd, (0, 2, 1)), total, input_precision="ieee")
    finish(
        out_ptr, total, n, m, split, xa_ptr, lora_b_ptr, bias_ptr, scale_ptr, scale, tensor_scale, m_size, n_size, rank,
        matrices, second, third, bias_size, SPLIT,
    )


def nvfp4_decode_triton(
    x: Tensor, tensors: list[Tensor], sizes: list[int], features: list[int], xa: Tensor | None, lora_b: Tensor | None,
    scale: float, scale_tensor: Tensor | None, bias: Tensor | None,
) -> Tensor:
    """Launch the kernel; x, xa (M, S * R) and lora_b (N, R) are contiguous and of one dtype."""
    rows, outputs, chip = x.shape[0], sum(features), capability(x.device)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    launch = few_rows.narrow_launch(rows, outputs, x.shape[1], chip)
    nvfp4_decode_kernel[few_rows.grid(rows, outputs, launch)](
        out, x, *tensors, x.shape[1] // 2,
        *few_rows.finish_arguments(x, tensors[2], features, xa, lora_b, scale, scale_tensor, bias),
        NATIVE=chip >= NATIVE, **launch.options,
    )
    return out


def nvfp4_variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    types = {"codes_ptr": "*u8", "scales_ptr": "*u8", "divisors_ptr": "*fp32"}
    choices = few_rows.launches(capability) if capability < 80 else few_rows.narrow_launches(capability)
    return [few_rows.variant(f"nvfp4_decode {name}", nvfp4_decode_kernel, types, dtype, launch,
                             NATIVE=capability >= NATIVE) for name, launch in choices.items()]


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    return [*nf4_variants(capability, dtype), *fp8_variants(capability, dtype), *nvfp4_variants(capability, dtype)]
