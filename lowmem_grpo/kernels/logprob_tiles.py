"""Gradients of the log-probabilities tile by tile along the vocabulary, all rows of a tile at once.

A tile is (N, T) logits, vocabulary entries first ... first + T - 1. Running through the vocabulary this way, the
gradient of each row of the head is one product with all rows, rounded once.

    d = (g (onehot - p) - h p (log p + entropy)) * slope,  log p = (z - m) - log s      written over the logits
    grad_hidden = sum over tiles of d W,  grad_weight = d^T hidden,  grad_bias = sum over rows of d

g, h: gradients of the log-probability and of the entropy of each row (d entropy / d z_v = -p_v (log p_v + entropy));
m, s: max z and sum exp(z - m) over the whole vocabulary. A 16-bit d fills the first half of each row's bytes.
"""

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import custom_op
from lowmem_grpo.kernels.logits import (
    LogitShape,
    floor_,
    floored,
    kernels_take,
    new_logits,
    packed_gradient,
    shape_logits,
    types_of_logits,
)
from lowmem_grpo.kernels.matmul import accumulator_dtype, addmm_fp32, matmul_fp32
from lowmem_grpo.kernels.triton_utils import Launch, Variant, flagged, tl, triton

LAUNCH = Launch({"BLOCK_V": 1024}, num_warps=4, num_stages=1)


def backward_tiles(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, scale: float,
    softcap: float | None, ignore_index: int, tile: int, results: Tensor, grad_logprobs: Tensor,
    grad_entropy: Tensor | None, needed: list[bool],
) -> list[Tensor]:
    """Return gradients of hidden (N, D), weight (V, D) and bias (V,), empty if not needed, from the results (4, N) of
    `forward_rows` and the gradients (N,). These are divided by their largest magnitude before anything is rounded to 16
    bits, and the results multiplied by it in float32: a loss averaged over many tokens does not underflow in
    float16."""
    smallest = grad_logprobs.new_full((1,), torch.finfo(grad_logprobs.dtype).tiny)  # for a divisor above 0 if all are 0
    present = [grad for grad in (grad_logprobs, grad_entropy) if grad is not None]
    most = torch.cat([smallest, *present]).abs().amax()
    _, entropy, maximum, log_sum = results
    rows = (maximum, log_sum, entropy, grad_logprobs / most, None if grad_entropy is None else grad_entropy / most)
    total = hidden.new_zeros(hidden.shape if needed[0] else 0, dtype=accumulator_dtype(hidden.dtype))
    _, grad_weight, grad_bias = new_gradients(hidden, weight, bias, [False, *needed[1:]])
    buffer = new_logits(hidden, len(hidden), min(tile, len(weight)))
    differentiate = logprob_tile_bwd if kernels_take(buffer) else differentiate_ref
    for start in range(0, len(weight), tile):
        band = slice(start, min(start + tile, len(weight)))
        logits = matmul_fp32(hidden, weight[band].T, out=buffer[:, : band.stop - start])
        differentiate(logits, targets, None if bias is None else bias[band], *rows, temperature, scale, softcap,
                      ignore_index, start, hidden.dtype)
        difference = packed_gradient(logits, hidden.dtype)
        if needed[0]:
            addmm_fp32(total, difference, weight[band])
        if needed[1]:
            grad_weight[band] = matmul_fp32(difference.T, hidden).mul_(most)
        if needed[2]:
            grad_bias[band] = difference.sum(0, dtype=most.dtype).mul_(most)
    return [total.mul_(most).to(hidden.dtype), grad_weight, grad_bias]


def new_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: list[bool]) -> list[Tensor]:
    """Return uninitialised gradients of the operands, empty if not needed."""
    return [torch.empty_like(part, memory_format=torch.contiguous_format) if wanted and part is not None
            else hidden.new_empty(0) for part, wanted in zip((hidden, weight, bias), needed, strict=True)]


def differentiate_ref(
    logits: Tensor, targets: Tensor, bias: Tensor | None, maximum: Tensor, log_sum: Tensor, entropy: Tensor,
    grad_logprobs: Tensor, grad_entropy: Tensor | None, temperature: float, scale: float, softcap: float | None,
    ignore_index: int, first: int, gradient_dtype: torch.dtype,
) -> None:
    """Turn raw logits (N, T) of the entries from `first` on into d, in the place of `packed_gradient`; bias (T,) is
    theirs. Needs one more buffer of the size of the logits, two for an entropy gradient."""
    shape = LogitShape(temperature, scale, softcap, ignore_index)
    columns = (targets - first).clamp(0, logits.shape[1] - 1)[:, None]
    here = columns.squeeze(-1) + first == targets
    floor_(shape.apply_(logits, bias)).sub_(maximum[:, None])
    difference = (logits - log_sum[:, None]).exp_().mul_(-grad_logprobs[:, None])
    if grad_entropy is not None:
        log_probs = logits - log_sum[:, None]
        difference.sub_(log_probs.exp() * (log_probs + entropy[:, None]) * grad_entropy[:, None])
    difference.scatter_add_(1, columns, torch.where(here, grad_logprobs, 0)[:, None])
    difference.mul_(shape.slope_(logits, maximum[:, None])).masked_fill_((targets == ignore_index)[:, None], 0)
    packed_gradient(logits, gradient_dtype).copy_(difference)


@triton.jit
def logprob_tile_bwd_kernel(
    logits_ptr, gradient_ptr, targets_ptr, bias_ptr, maximum_ptr, log_sum_ptr, entropy_ptr, grad_logprobs_ptr,
    grad_entropy_ptr, T, first, logits_stride, gradient_stride, temperature, scale, softcap, ignore_index,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    gradient_ptr += row * gradient_stride
    target = tl.load(targets_ptr + row)
    kept = target != ignore_index
    maximum = tl.load(maximum_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    grad_logprob = tl.load(grad_logprobs_ptr + row)
    entropy = tl.load(entropy_ptr + row)
    grad_entropy = tl.load(grad_entropy_ptr + row) if HAS_ENTROPY else 0.0
    lanes = tl.arange(0, BLOCK_V)
    for start in range(0, T, BLOCK_V):
        columns = start + lanes
        inside = columns < T
        raw = tl.load(logits_ptr + columns, mask=inside, other=0.0)
        tl.debug_barrier()  # see logprob_rows_kernel: a narrower result is written over bytes that all have read
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
        z, slope = shape_logits(raw, bias, scale, softcap, temperature, HAS_SOFTCAP)
        log_prob = floored(z) - maximum - log_sum
        prob = tl.exp(log_prob)
        onehot = tl.where(columns + first == target, 1.0, 0.0)
        gradient = grad_logprob * (onehot - prob)
        if HAS_ENTROPY:
            gradient -= grad_entropy * prob * (log_prob + entropy)
        gradient = tl.where(kept, gradient * slope, 0.0)
        tl.store(gradient_ptr + columns, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)


def logprob_tile_bwd_triton(
    logits: Tensor, targets: Tensor, bias: Tensor | None, maximum: Tensor, log_sum: Tensor, entropy: Tensor,
    grad_logprobs: Tensor, grad_entropy: Tensor | None, temperature: float, scale: float, softcap: float | None,
    ignore_index: int, first: int, gradient_dtype: torch.dtype,
) -> None:
    """Write the gradient of one tile of logits (N, W) over it."""
    rows, columns = logits.shape
    gradient = packed_gradient(logits, gradient_dtype)
    if rows:
        logprob_tile_bwd_kernel[(rows,)](
            logits, gradient, targets, logits if bias is None else bias, maximum, log_sum, entropy, grad_logprobs,
            grad_logprobs if grad_entropy is None else grad_entropy, columns, first, logits.stride(0),
            gradient.stride(0), float(temperature), float(scale), float(softcap or 0), ignore_index,
            HAS_BIAS=bias is not None, HAS_SOFTCAP=bool(softcap), HAS_ENTROPY=grad_entropy is not None,
            **LAUNCH.options,
        )


logprob_tile_bwd = custom_op("logprob_tile_bwd", differentiate_ref, logprob_tile_bwd_triton, mutates=("logits",))


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    rows = ("maximum_ptr", "log_sum_ptr", "entropy_ptr", "grad_logprobs_ptr", "grad_entropy_ptr")
    types = types_of_logits(logprob_tile_bwd_kernel, dtype, **dict.fromkeys(rows, "*fp32"))
    flags = ("HAS_BIAS", "HAS_SOFTCAP", "HAS_ENTROPY")
    return flagged("logprob_tile_bwd", logprob_tile_bwd_kernel, types, LAUNCH, flags)
