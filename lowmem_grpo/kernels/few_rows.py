"""The shared part of the kernels that multiply a few rows with a quantized weight, as in decode steps.

    out = x W^T + scale * xa_s B^T + bias        xa_s: the R columns of xa = x A^T that belong to matrix s of W

x (M, K) with M up to 64, W (N, K), xa (M, S * R), B (N, R), bias (N,); W is S matrices on top of each other, in NF4,
FP8 or NVFP4 (few_rows_kernels.py).

W is the large operand of the tensor cores and x, with M padded to 8, 16, 32 or 64, the narrow one, so M costs next to
nothing. Weights are scaled in float32 and rounded to x.dtype first, which gives exactly the values of training. The
SPLIT warps of a block divide K and are summed in a fixed order, which always gives the same bits.
"""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels import triton_utils
from lowmem_grpo.kernels.custom_op import custom_op
from lowmem_grpo.kernels.triton_utils import Launch, Variant, capability, next_power_of_2, tl, triton, types_of

MAX_MATRICES = 3  # adjacent matrices in a weight
WARPS, LEAST_STEPS = 1024, 6  # targets of `narrow_launch`: warps in all, steps of a warp (64 weights each)
WIDE = 8192  # with this many outputs there are enough blocks to make each larger
# Rows up to which the kernels are faster than dequantizing the weight first, by form and by the least compute
# capability; a further kind of weights adds its entry. Below 80 these are estimates, from data sheets
# (memory/cards.py) and from the instructions of the compiled loops (memory/layer_forms.py), in picoseconds per weight
# and 8 rows:
#
#     T4, sm_75    NF4: kernel 2.6, dequantize and multiply 15.7: 5 blocks.    FP8: 4.2 and 17.4: 4 blocks
#     V100, sm_70  NF4: 1.4 and 5.6: 4 blocks.                                 FP8: 1.9 and 6.2: 3 blocks
#
# NVFP4's kernel has 22.1 instructions where NF4's has 17.6 (3.3 and 1.8), and about as many bytes: 4 and 3 blocks.
TAKEN_ROWS = {"nf4": {80: 64, 75: 40, 0: 32}, "fp8": {80: 64, 75: 32, 0: 24},
              "nvfp4": {80: 64, 75: 32, 0: 24}}
# Arguments that are not specialised: no new compilation if one of them is 1 or a multiple of 16.
VARYING = ["m_size", "matrices", "second", "third", "bias_size"]


def decode_ref(
    x: Tensor, weight: Tensor, features: Sequence[int], xa: Tensor | None = None, lora_b: Tensor | None = None,
    scale: float | Tensor = 1.0, bias: Tensor | None = None,
) -> Tensor:
    """Compute `out` in plain torch for a dequantized weight (N, K); `features` holds the rows of each matrix."""
    out = x @ weight.T
    if xa is not None and lora_b is not None:
        inputs, factors = (xa * scale).split(lora_b.shape[1], 1), lora_b.split(list(features))
        out = out + torch.cat([part @ b.T for part, b in zip(inputs, factors, strict=True)], 1)
    return out if bias is None else out + bias


def takes_rows(x: Tensor, features: Sequence[int], form: str) -> bool:
    """Return whether the kernel for `form` ("nf4", ...) takes x (M, K): few 16-bit rows on CUDA, few matrices."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16) or len(features) > MAX_MATRICES:
        return False
    return 0 < x.shape[0] <= taken_rows(capability(x.device), form) and sum(features) > 0


def max_rows(capability: int) -> int:
    """Return the most rows of x that one block takes: 64, or 8 before sm_80, where Triton uses no tensor cores."""
    return 64 if capability >= 80 else 8


def taken_rows(capability: int, form: str) -> int:
    """Return the most rows for which the kernel of this form ("nf4", ...) is faster than dequantizing first."""
    return next(most for least, most in TAKEN_ROWS[form].items() if capability >= least)


def decode_launch(rows: int, outputs: int, capability: int, step: int = 32) -> Launch:
    """Return a launch whose warps divide K; each warp reads `step` bytes of a row of W at a time. From sm_80 on, the
    number of warps is limited by shared memory, which holds columns of x for each warp."""
    rows = min(rows, max_rows(capability))
    if capability < 80:
        block_m = 1 if rows == 1 else max(4, next_power_of_2(rows))
        constexprs = {"BLOCK_M": block_m, "BLOCK_N": 32, "SPLIT": 4, "BYTES": step}
        return Launch(constexprs, num_warps=8 if block_m == 8 else 4, num_stages=2)
    block_m, wide = max(8, next_power_of_2(rows)), outputs >= WIDE
    roomy = triton_utils.SHARED_MEMORY.get(capability, 0) >= 160 << 10
    split = min(8 if wide else 16, (256 if roomy else 128) // block_m)
    constexprs = {"BLOCK_M": block_m, "BLOCK_N": 64 if wide and block_m < 64 else 32, "SPLIT": split, "BYTES": step}
    return Launch(constexprs, num_warps=split, num_stages=3 if roomy and block_m == 8 else 2)


def narrow_launch(rows: int, outputs: int, columns: int, capability: int) -> Launch:
    """Return a launch of few warps for the NF4 kernel. On an H100, with one block of 64 a step, the kernel takes on
    average 1.05 times as long as with the best of 209 launches; with `decode_launch` it takes 1.45 times as long.

    In a step a warp reads up to 4 blocks of 64, so that the loop's own instructions serve more weights."""
    if capability < 80:
        return decode_launch(rows, outputs, capability)
    block_m = max(8, next_power_of_2(rows))
    block_n = 32 if block_m == 64 else 16
    wanted = min(WARPS * 16 / outputs, columns / (64 * LEAST_STEPS))
    split = min(1 << max(0, round(math.log2(max(wanted, 1)))), 256 // block_m, 16)
    split, shared = max(split, 32 // block_n), triton_utils.SHARED_MEMORY.get(capability, 0)
    blocks = max(1, 32 // block_m) if columns % 256 == 0 else 1
    while blocks > 1 and 4 * split * blocks * (32 * block_n + 128 * block_m) > shared:  # two buffers, two thread blocks
        blocks //= 2
    constexprs = {"BLOCK_M": block_m, "BLOCK_N": block_n, "SPLIT": split, "BYTES": 32 * blocks}
    return Launch(constexprs, num_warps=split, num_stages=3 if shared >= 160 << 10 or block_m == 8 else 2)


def grid(rows: int, outputs: int, launch: Launch) -> tuple[int, int]:
    return triton.cdiv(outputs, launch.constexprs["BLOCK_N"]), triton.cdiv(rows, launch.constexprs["BLOCK_M"])


@triton.jit
def finish(
    out_ptr, total, n, m, split, xa_ptr, lora_b_ptr, bias_ptr, scale_ptr, scale, tensor_scale, m_size, n_size, rank,
    matrices, second, third, bias_size, SPLIT: tl.constexpr,
):
    # adds LoRA as further columns (B next to W, scale * xa next to x) and the bias to x W^T, and stores the result
    dtype = out_ptr.dtype.element_ty
    n_inside = n < n_size
    m_inside = m < m_size
    lora_scale = scale + tensor_scale * tl.load(scale_ptr)
    for matrix in tl.range(0, matrices, num_stages=1):
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


def decode_op(kind: Any, kernel: Callable[..., Tensor]) -> Any:
    """Register the operation of a FrozenWeight class: `kernel` on a card, else plain torch with dequantized weights."""

    def decode_cpu(
        x: Tensor, tensors: list[Tensor], sizes: list[int], features: list[int], xa: Tensor | None,
        lora_b: Tensor | None, scale: float, scale_tensor: Tensor | None, bias: Tensor | None,
    ) -> Tensor:
        whole = scale if scale_tensor is None else scale + scale_tensor
        values = kind.from_parts(tensors, sizes, features, x.dtype).dequantized()
        return decode_ref(x, values, features, xa, lora_b, whole, bias)

    def fake(x: Tensor, tensors: list[Tensor], sizes: list[int], features: list[int], *others: Any) -> Tensor:
        return x.new_empty(x.shape[0], sum(features))

    return custom_op(f"{kind.kind}_decode", decode_cpu, kernel, fake=fake)


def given_adapters(
    xa: Tensor | None, lora_b: Tensor | None, scale: float | Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, float, Tensor | None, Tensor | None]:
    """Return (xa, lora_b, scale, scale tensor, bias), the last arguments of a decode operation. Either the scale is 0.0
    or the scale tensor is None."""
    number, tensor = (0.0, scale.float()) if isinstance(scale, Tensor) else (float(scale), None)
    a, b, added = (part if part is None else part.contiguous() for part in (xa, lora_b, bias))
    return a, b, number, tensor, added


def finish_arguments(
    x: Tensor, table: Tensor, features: Sequence[int], xa: Tensor | None, lora_b: Tensor | None, scale: float,
    scale_tensor: Tensor | None, bias: Tensor | None,
) -> tuple[Any, ...]:
    """Return the arguments of `finish` in order. In place of a missing tensor stands x, or for the scale the float32
    `table`, whose first number is multiplied by 0."""
    ends = [sum(features[: number + 1]) for number in range(MAX_MATRICES - 1)]
    return (
        x if xa is None else xa, x if lora_b is None else lora_b, x if bias is None else bias,
        table if scale_tensor is None else scale_tensor, scale, 0.0 if scale_tensor is None else 1.0, x.shape[0],
        sum(features), 0 if lora_b is None else lora_b.shape[1], len(features), *ends,
        0 if bias is None else sum(features),
    )


def launches(capability: int, step: int = 32) -> dict[str, Launch]:
    """Return every launch that `decode_launch` can choose, by name."""
    return {
        f"rows<={rows} wide={outputs == WIDE}": decode_launch(rows, outputs, capability, step)
        for rows in (1, 4, 8, 16, 32, 64) if rows <= max_rows(capability) and (rows >= 8 or capability < 80)
        for outputs in (WIDE // 2, WIDE)
    }


def narrow_launches(capability: int) -> dict[str, Launch]:
    """Return every launch that `narrow_launch` can choose, by name."""
    by_name = {}
    for rows, power, columns in product((8, 16, 32, 64), range(5), (1 << 20, (1 << 20) + 64)):
        launch = narrow_launch(rows, WARPS * 16 >> power, columns, capability)
        by_name[f"rows<={rows} split={launch.constexprs['SPLIT']} bytes={launch.constexprs['BYTES']}"] = launch
    return by_name


def variant(
    name: str, kernel: Any, weight_types: dict[str, str], dtype: torch.dtype, launch: Launch, **constexprs: bool
) -> Variant:
    types = types_of(kernel, dtype, scale_ptr="*fp32", scale="fp32", tensor_scale="fp32", **weight_types)
    return Variant(name, kernel, types, launch, constexprs)
