"""The functions that models and samplers apply to logits, in torch and Triton.

    z = (raw + bias) * scale;  z = softcap * tanh(z / softcap);  z = z / temperature
    slope = dz / d raw = scale / temperature * (1 - tanh(...)^2)

Later steps use z minus the largest z of its row: at a temperature of 0.01 z is in the thousands and loses digits.

Scale: Cohere's and Granite's logit scaling. Softcap: Gemma 2 (arXiv 2408.00118, section 2). Temperature: the sampler's.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import accumulator_dtype
from lowmem_grpo.kernels.triton_utils import tl, triton, types_of

FLOOR = tl.constexpr(-3.0e38)  # stands in for -inf, so that p log p is 0 at p = 0
DOT_COLUMNS = 4096  # columns that are multiplied at a time
NONE_IGNORED = -(2**62)  # equals no target


class LogitShape(NamedTuple):
    """The numbers in this module's formulas, and the target of rows that give 0 and no gradient (`ignore_index`)."""

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    ignore_index: int = NONE_IGNORED

    def apply_(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        """Turn raw logits (R, V) into z in place."""
        if bias is not None:
            logits += bias
        if self.scale != 1.0:
            logits *= self.scale
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits.div_(self.temperature) if self.temperature != 1.0 else logits

    def slope_(self, shifted: Tensor, maximum: Tensor) -> Tensor | float:
        """Return the slope: a number, or with a softcap (R, V), written over `shifted`, which is z - `maximum`."""
        slope = self.scale / self.temperature
        if not self.softcap:
            return slope
        return shifted.add_(maximum).mul_(self.temperature / self.softcap).square_().mul_(-slope).add_(slope)


def new_logits(hidden: Tensor, rows: int, columns: int) -> Tensor:
    return hidden.new_empty(rows, columns, dtype=accumulator_dtype(hidden.dtype))


def kernels_take(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype == torch.float32


def packed_gradient(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return logits (R, V) as a view (R, V) in `dtype`; 16-bit numbers take the first half of each row."""
    return logits if dtype == logits.dtype else logits.view(dtype)[:, : logits.shape[1]]


def floor_(logits: Tensor) -> Tensor:
    """Make -inf finite, in place."""
    return logits.clamp_(min=torch.finfo(logits.dtype).min)


def row_dot(left: Tensor, right: Tensor) -> Tensor:
    """Return the dot products (R,) of the rows of two tensors (R, V), taken by bands to avoid a buffer (R, V)."""
    bands = zip(left.split(DOT_COLUMNS, 1), right.split(DOT_COLUMNS, 1), strict=True)
    return torch.stack([torch.linalg.vecdot(*band) for band in bands]).sum(0)


def types_of_logits(kernel: Any, dtype: torch.dtype, **others: str) -> dict[str, str]:
    """Return the Triton types of a kernel that turns float32 logits into a gradient of the head's `dtype`."""
    floats = dict.fromkeys(("temperature", "scale", "softcap"), "fp32")
    return types_of(kernel, dtype, logits_ptr="*fp32", targets_ptr="*i64", ignore_index="i64", **floats, **others)


@triton.jit
def floored(z):
    """Return a block with -inf made finite; NaN stays NaN."""
    return tl.where(z < FLOOR, FLOOR, z)


@triton.jit
def shape_logits(raw, bias, scale, softcap, temperature, HAS_SOFTCAP: tl.constexpr):
    """Return (z, slope) of a block of raw logits, float32."""
    z = (raw + bias) * scale
    slope = scale / temperature + tl.zeros_like(z)
    if HAS_SOFTCAP:
        # tanh by the exponential of a negative number, which never overflows; near 0, where that cancels, by its series
        x = z / softcap
        decay = tl.exp(-2.0 * tl.abs(x))
        far = tl.where(x < 0, -1.0, 1.0) * (1.0 - 2.0 * decay / (1.0 + decay))
        square = tl.where(tl.abs(x) < 0.3, x * x, 0.0)
        near = x + x * square * (-0.33333333 + square * (0.13333333 + square * (-0.05396825 + square * 0.02186949)))
        z = softcap * tl.where(tl.abs(x) < 0.3, near, far)
        slope = slope * 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
    return z / temperature, slope


@triton.jit
def row_statistics(
    logits_ptr, bias_ptr, V, temperature, scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Return (m, sum exp(z - m), sum exp(z - m) (z - m)) of one row of V raw logits, m = max z, in one pass over it."""
    lanes = tl.arange(0, BLOCK_V)
    lane_max = tl.full((BLOCK_V,), FLOOR, tl.float32)  # each lane keeps its own three, merged at the end
    lane_sum = tl.zeros((BLOCK_V,), tl.float32)
    lane_weighted = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, V, BLOCK_V):
        columns = start + lanes
        inside = columns < V
        raw = tl.load(logits_ptr + columns, mask=inside, other=0.0)
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
        z, _ = shape_logits(raw, bias, scale, softcap, temperature, HAS_SOFTCAP)
        z = tl.where(inside, floored(z), FLOOR)
        new_max = tl.maximum(lane_max, z)
        decay = tl.exp(lane_max - new_max)
        weight = tl.where(inside & (z != FLOOR), tl.exp(z - new_max), 0.0)  # 0 until the first finite z
        lane_weighted = decay * (lane_weighted + lane_sum * (lane_max - new_max)) + weight * (z - new_max)
        lane_sum = decay * lane_sum + weight
        lane_max = new_max
    row_max = tl.max(lane_max, 0)
    decay = tl.exp(lane_max - row_max)
    weighted = tl.sum(decay * (lane_weighted + lane_sum * (lane_max - row_max)), 0)
    return row_max, tl.sum(decay * lane_sum, 0), weighted
