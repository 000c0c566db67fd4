"""x W^T for a few rows of x and W in FP8, with LoRA and bias in the same kernel. few_rows.py holds the shared part.

Scales are by row, one for all, or by blocks that a tile of 64 columns does not cross (128 x 128; groups of 64 or more).
Finer blocks are dequantized first, as they are for many rows. From sm_89 on the card converts codes itself; below, the
bits are moved (fp8.py).
"""

import torch
from torch import Tensor

from lowmem_grpo.kernels import few_rows
from lowmem_grpo.kernels.few_rows import VARYING, finish
from lowmem_grpo.kernels.fp8 import FP8Weight, e4m3, fp8_dequantize_ref
from lowmem_grpo.kernels.triton_utils import Variant, capability, tl, triton

STEP = 64  # columns that each share of K reads at a time
NATIVE = 89  # compute capability from which Triton has the type e4m3


def can_decode_fp8(x: Tensor, weight: FP8Weight) -> bool:
    """Return whether the kernel takes x: few 16-bit rows on CUDA, W in steps of 16 bytes, a scale for 64 columns."""
    one_scale = weight.scales.shape[1] == 1 or weight.block[1] % STEP == 0
    return few_rows.takes_rows(x, weight.out_features, "fp8") and x.shape[1] % 16 == 0 and one_scale


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


fp8_decode_op = few_rows.decode_op(
    "fp8_decode", lambda tensors, sizes, features, dtype: fp8_dequantize_ref(
        FP8Weight(tensors[0], tensors[1], (sizes[0], sizes[1]), dtype, tuple(features))), fp8_decode_triton)


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    """Return every launch that the rule chooses, with scales by row and by block."""
    types = {"codes_ptr": "*u8", "scales_ptr": "*fp32"}
    return [
        few_rows.variant(f"fp8_decode {name} by_row={by_row}", fp8_decode_kernel, types, dtype, launch, BY_ROW=by_row,
                         NATIVE=capability >= NATIVE)
        for name, launch in few_rows.launches(capability, STEP).items() for by_row in (True, False)
    ]
