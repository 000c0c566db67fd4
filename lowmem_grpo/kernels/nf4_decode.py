"""x W^T for a few rows of x and a 4-bit W, which is read once, with LoRA and bias in the same kernel: decoding.

    out = x W^T + scale * xa_s B^T + bias        xa_s: the columns of xa = x A^T that belong to a row's matrix

x (M, K) with M up to 64, W (N, K), xa (M, S * R), B (N, R), bias (N,); W is S matrices on top of each other.

The weight is the large operand of the tensor cores and M, padded to 8, 16, 32 or 64, the narrow one, so M costs next
to nothing. A byte holds an even and an odd column: the high nibbles are multiplied with the even columns of x, the low
ones with the odd columns, in two products, and nothing is interleaved. Each weight is scaled in float32 and rounded to
x.dtype before the product: these are the very values that training multiplies with. The SPLIT warps of a block share
out K as the batch of a batched product and add up in a fixed order at the end: enough warps for narrow weights without
a second kernel, and the same bits every time.

What bounds it, counted in the compiled loop and not measured: a weight takes one shuffle (32 a clock and
multiprocessor), one shift (64), one multiplication (128) and half a conversion (64), and 5 instructions in all (128).
At 1.8 GHz the 132 multiprocessors of an H200 thus need about 10 us for 4096 x 14336 and 3 us for 4096 x 4096, against
7 us and 2 us for the bytes. Before sm_80 Triton multiplies without tensor cores: 8 instructions for one row, 17 for 8.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.launch import SHARED_MEMORY, TRITON_TYPES, Launch, Variant, capability, next_power_of_2
from lowmem_grpo.kernels.nf4 import NF4Weight, nf4_dequantize_ref, weight_types
from lowmem_grpo.kernels.nf4_lookup import block_scale, lookup_high, lookup_low
from lowmem_grpo.kernels.opaque import opaque
from lowmem_grpo.kernels.triton_import import tl, triton

MAX_MATRICES = 3  # that lie adjacent in a weight
# Arguments whose value does not change the code: no new compilation where one of them is 1 or a multiple of 16.
VARYING = ["m_size", "matrices", "second", "third", "bias_size", "offset_stride", "block_shift", "first_block"]
WIDE = 8192  # outputs from which on there are enough blocks for larger ones


def nf4_decode_ref(
    x: Tensor, weight: NF4Weight, xa: Tensor | None = None, lora_b: Tensor | None = None,
    scale: float | Tensor = 1.0, bias: Tensor | None = None,
) -> Tensor:
    """(M, N) in x.dtype."""
    out = x @ nf4_dequantize_ref(replace(weight, dtype=x.dtype)).T
    if xa is not None and lora_b is not None:
        inputs, factors = (xa * scale).split(lora_b.shape[1], 1), lora_b.split(weight.out_features)
        out = out + torch.cat([part @ b.T for part, b in zip(inputs, factors, strict=True)], 1)
    return out if bias is None else out + bias


def can_decode(x: Tensor, weight: NF4Weight) -> bool:
    """Whether the kernel takes x (M, K): few 16-bit rows on CUDA, and rows of W made of whole blocks of 64 or more."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16) or len(weight.out_features) > MAX_MATRICES:
        return False
    whole_blocks = weight.blocksize >= 64 and x.shape[1] % weight.blocksize == 0
    return 0 < x.shape[0] <= max_rows(capability(x.device)) and whole_blocks and weight.shape[0] > 0


def max_rows(capability: int) -> int:
    """Rows from which on it is better to dequantize: Triton uses no tensor cores before sm_80."""
    return 64 if capability >= 80 else 8


def decode_launch(rows: int, outputs: int, capability: int) -> Launch:
    """One warp for each share of K, as many as shared memory has room for their columns of x."""
    if capability < 80:
        block_m = 1 if rows == 1 else max(4, next_power_of_2(rows))
        constexprs = {"BLOCK_M": block_m, "BLOCK_N": 32, "SPLIT": 4, "BYTES": 32}
        return Launch(constexprs, num_warps=8 if block_m == 8 else 4, num_stages=2)
    block_m, wide = max(8, next_power_of_2(rows)), outputs >= WIDE
    roomy = SHARED_MEMORY.get(capability, 0) >= 160 << 10
    split = min(8 if wide else 16, (256 if roomy else 128) // block_m)
    constexprs = {"BLOCK_M": block_m, "BLOCK_N": 64 if wide and block_m < 64 else 32, "SPLIT": split, "BYTES": 32}
    return Launch(constexprs, num_warps=split, num_stages=3 if roomy and block_m == 8 else 2)


def candidates(rows: int, capability: int) -> dict[str, Launch]:
    """Launches that the rule does not choose, for a card to time beside it (bench/kernels/bench.py).

    For 33 to 64 rows: each block reads all of x, so blocks of 64 outputs read half as much of it from the second-level
    cache as the rule's 32. With 4 shares of K, two warps to each, no register spills (182 on sm_90).
    """
    if capability < 80 or not 32 < rows <= 64:
        return {}
    return {"n64": Launch({"BLOCK_M": 64, "BLOCK_N": 64, "SPLIT": 4, "BYTES": 32}, num_warps=8, num_stages=2)}


@triton.jit(do_not_specialize=VARYING)
def nf4_decode_kernel(
    out_ptr, x_ptr, packed_ptr, absmax_ptr, code_ptr, nested_code_ptr, nested_absmax_ptr, offset_ptr, xa_ptr,
    lora_b_ptr, bias_ptr, scale_ptr, scale, tensor_scale, m_size, n_size, row_bytes, rank, matrices, second, third,
    bias_size, offset_stride, block_shift, first_block, nested_shift,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, BYTES: tl.constexpr, NESTED: tl.constexpr,
    SHUFFLE: tl.constexpr,
):
    dtype = x_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    split = tl.arange(0, SPLIT)
    n_inside = n < n_size
    m_inside = m < m_size
    row_bytes = tl.multiple_of(row_bytes, 32)  # whole blocks of 64
    row = tl.where(n_inside, n, 0).to(tl.int64) * row_bytes
    packed_rows = packed_ptr + row[None, :, None] + tl.arange(0, BYTES)[None, None, :]
    x_rows = x_ptr + m[None, :, None] * (2 * row_bytes) + tl.arange(0, 2 * BYTES)[None, None, :]
    if SHUFFLE:
        # The address of the table, as if it were loaded (m_size is not negative, so it is not). The compiler converts
        # layouts where values are loaded, so it now converts packed bytes; a value from elsewhere in the look-up would
        # make it convert the weights, four times larger, through shared memory.
        zero = tl.arange(0, 1)
        somewhere = code_ptr.to(tl.pointer_type(tl.int64)) + zero
        table = tl.load(somewhere, mask=zero + m_size < 0, other=code_ptr.to(tl.int64))[None, :, None]
    total = tl.zeros((SPLIT, BLOCK_N, BLOCK_M), tl.float32)
    for step in range(0, tl.cdiv(row_bytes, SPLIT * BYTES)):
        byte = (step * SPLIT + split) * BYTES
        inside = byte < row_bytes
        packed = tl.load(packed_rows + byte[:, None, None], mask=inside[:, None, None], other=0)
        x = tl.load(
            x_rows + 2 * byte[:, None, None], mask=inside[:, None, None] & m_inside[None, :, None], other=0.0
        )
        even, odd = tl.split(tl.reshape(x, (SPLIT, BLOCK_M, BYTES, 2)))
        scales = block_scale(
            row[None, :] + byte[:, None], inside[:, None], absmax_ptr, nested_code_ptr, nested_absmax_ptr, offset_ptr,
            offset_stride, block_shift, first_block, nested_shift, NESTED,
        )[:, :, None]
        if SHUFFLE:
            high = lookup_high(packed, table)
            low = lookup_low(packed, table)
        else:
            high = tl.load(code_ptr + (packed >> 4))
            low = tl.load(code_ptr + (packed & 15))
        total = tl.dot((high * scales).to(dtype), tl.trans(even, (0, 2, 1)), total, input_precision="ieee")
        total = tl.dot((low * scales).to(dtype), tl.trans(odd, (0, 2, 1)), total, input_precision="ieee")
    lora_scale = scale + tensor_scale * tl.load(scale_ptr)
    for matrix in tl.range(0, matrices, num_stages=1):  # LoRA as further columns: B next to W, scale * xa next to x
        begin = tl.where(matrix == 0, 0, tl.where(matrix == 1, second, third))
        end = tl.where(matrix == matrices - 1, n_size, tl.where(matrix == 0, second, third))
        belongs = (n >= begin) & (n < end)
        for first in tl.range(0, rank, SPLIT * 16, num_stages=1):
            r = first + split[:, None] * 16 + tl.arange(0, 16)[None, :]
            r_inside = (r < rank)[:, None, :]
            b = tl.load(
                lora_b_ptr + n.to(tl.int64)[None, :, None] * rank + r[:, None, :],
                mask=r_inside & belongs[None, :, None], other=0.0,
            )
            a = tl.load(
                xa_ptr + (m[None, :, None] * matrices + matrix) * rank + r[:, None, :],
                mask=r_inside & m_inside[None, :, None], other=0.0,
            )
            a = tl.trans((a.to(tl.float32) * lora_scale).to(dtype), (0, 2, 1))
            total = tl.dot(b, a, total, input_precision="ieee")
    out = tl.sum(total, 0) + tl.load(bias_ptr + n, mask=n < bias_size, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + m[None, :] * n_size + n[:, None], out.to(dtype), mask=n_inside[:, None] & m_inside[None, :])


def nf4_decode_cpu(
    x: Tensor, packed: Tensor, absmax: Tensor, code: Tensor, nested_code: Tensor | None,
    nested_absmax: Tensor | None, offset: Tensor | None, columns: int, blocksize: int, nested_blocksize: int,
    first_block: int, out_features: list[int], xa: Tensor | None, lora_b: Tensor | None, scale: float,
    scale_tensor: Tensor | None, bias: Tensor | None,
) -> Tensor:
    """(M, N). The LoRA scale is scale, plus scale_tensor () float32 where it is given."""
    weight = NF4Weight(
        packed, absmax, code, (sum(out_features), columns), blocksize, x.dtype, tuple(out_features), nested_code,
        nested_absmax, offset, nested_blocksize, first_block,
    )
    return nf4_decode_ref(x, weight, xa, lora_b, scale if scale_tensor is None else scale + scale_tensor, bias)


def nf4_decode_triton(
    x: Tensor, packed: Tensor, absmax: Tensor, code: Tensor, nested_code: Tensor | None,
    nested_absmax: Tensor | None, offset: Tensor | None, columns: int, blocksize: int, nested_blocksize: int,
    first_block: int, out_features: list[int], xa: Tensor | None, lora_b: Tensor | None, scale: float,
    scale_tensor: Tensor | None, bias: Tensor | None, launch: Launch | None = None,
) -> Tensor:
    """The same with Triton; x, xa (M, S * R) and lora_b (N, R) are contiguous and of one dtype. `launch`: a candidate
    in place of the rule's."""
    rows, outputs = x.shape[0], sum(out_features)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    launch = launch or decode_launch(rows, outputs, capability(x.device))
    ends = [sum(out_features[: number + 1]) for number in range(MAX_MATRICES - 1)]
    nested = nested_code is not None
    nf4_decode_kernel[(triton.cdiv(outputs, launch.constexprs["BLOCK_N"]),)](
        out, x, packed, absmax, code, nested_code if nested else code, nested_absmax if nested else code,
        offset if nested else code, x if xa is None else xa, x if lora_b is None else lora_b,
        x if bias is None else bias, code if scale_tensor is None else scale_tensor, scale,
        0.0 if scale_tensor is None else 1.0, rows, outputs, columns // 2,
        0 if lora_b is None else lora_b.shape[1], len(out_features), *ends, 0 if bias is None else outputs,
        0 if offset is None else offset.ndim, (blocksize // 2).bit_length() - 1, first_block,
        nested_blocksize.bit_length() - 1, NESTED=nested, SHUFFLE=x.is_cuda, **launch.options,
    )
    return out


def nf4_decode_fake(
    x: Tensor, packed: Tensor, absmax: Tensor, code: Tensor, nested_code: Tensor | None,
    nested_absmax: Tensor | None, offset: Tensor | None, columns: int, blocksize: int, nested_blocksize: int,
    first_block: int, out_features: list[int], *others: Any,
) -> Tensor:
    """(M, N) uninitialised."""
    return x.new_empty(x.shape[0], sum(out_features))


nf4_decode_op = opaque("nf4_decode", nf4_decode_cpu, nf4_decode_triton, fake=nf4_decode_fake)


def nf4_decode(
    x: Tensor, weight: NF4Weight, xa: Tensor | None = None, lora_b: Tensor | None = None,
    scale: float | Tensor = 1.0, bias: Tensor | None = None,
) -> Tensor:
    """x (M, K) -> (M, N) where `can_decode`; xa (M, S * R), lora_b (N, R) and bias (N,) of x.dtype; no autograd."""
    number, tensor = (0.0, scale.float()) if isinstance(scale, Tensor) else (float(scale), None)
    parts = [part if part is None else part.contiguous() for part in (xa, lora_b, bias)]
    return nf4_decode_op(
        x.contiguous(), *weight.tensors, *weight.sizes, list(weight.out_features), *parts[:2], number, tensor, parts[2]
    )


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    """Every launch that the rule chooses, with single and double quantization, and every candidate."""
    value = "*" + TRITON_TYPES[dtype]
    types = dict.fromkeys(["out_ptr", "x_ptr", "xa_ptr", "lora_b_ptr", "bias_ptr"], value)
    scalars = {"scale_ptr": "*fp32", "scale": "fp32", "tensor_scale": "fp32"}
    integers = [name for name in nf4_decode_kernel.arg_names[14:] if not name.isupper()]
    launches = {
        f"rows<={rows} wide={outputs == WIDE}": decode_launch(rows, outputs, capability)
        for rows in (1, 4, 8, 16, 32, 64) if rows <= max_rows(capability) and (rows >= 8 or capability < 80)
        for outputs in (WIDE // 2, WIDE)
    }
    listed = [(name, launch, nested) for name, launch in launches.items() for nested in (False, True)]
    if dtype == torch.bfloat16:  # a candidate is timed on weights of QLoRA's kind only
        listed += [(f"rows<=64 candidate={name}", launch, True) for name, launch in candidates(64, capability).items()]
    return [
        Variant(
            f"nf4_decode {name} nested={nested}", nf4_decode_kernel,
            types | weight_types(nested) | scalars | dict.fromkeys(integers, "i32"), launch,
            {"NESTED": nested, "SHUFFLE": True},
        )
        for name, launch, nested in listed
    ]
