"""Log-probability, entropy, and the log-probability's gradient for a chunk of whole rows of logits, in place.

    m = max z;  s = sum exp(z - m);  logp = (z[target] - m) - log s;  gradient = (onehot(target) - p) * slope
    entropy = log s - sum(exp(z - m) (z - m)) / s

R rows, V vocabulary, p = softmax(z), z and slope as in `logits.py`. A row is read twice: once for a running maximum,
sum and weighted sum (Milakov and Gimelshein, arXiv 1805.02867), once to write the gradient over the logits. A 16-bit
gradient fills the first half of each row's bytes, so a chunk costs 4 R V bytes in all.
"""

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import custom_op
from lowmem_grpo.kernels.logits import (
    LogitShape,
    floor_,
    kernels_take,
    new_logits,
    packed_gradient,
    row_dot,
    row_statistics,
    shape_logits,
    types_of_logits,
)
from lowmem_grpo.kernels.matmul import matmul_fp32
from lowmem_grpo.kernels.triton_utils import Launch, Variant, flagged, tl, triton


def forward_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, scale: float,
    softcap: float | None, ignore_index: int, chunk_rows: int, keep_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return logprobs, entropy, m and log s, (4, N) together, where log sum exp(z) = m + log s, and U (N, D) in the
    dtype of hidden, empty if it is not kept; hidden (N, D), weight (V, D), bias (V,)."""
    rows, vocabulary = hidden.shape[0], weight.shape[0]
    buffer = new_logits(hidden, min(chunk_rows, rows), vocabulary)
    results = buffer.new_empty(4, rows)
    gradient = hidden.new_empty(hidden.shape if keep_gradient else 0)
    numbers, dtype = (temperature, scale, softcap, ignore_index), weight.dtype if keep_gradient else None
    finish = logprob_rows if kernels_take(buffer) else finish_rows_ref
    for start in range(0, rows, chunk_rows):
        chunk = slice(start, min(start + chunk_rows, rows))
        logits = matmul_fp32(hidden[chunk], weight.T, out=buffer[: chunk.stop - start])
        results[:, chunk] = finish(logits, targets[chunk], bias, *numbers, dtype)
        if keep_gradient:
            difference = packed_gradient(logits, weight.dtype)
            if not difference.is_cuda:  # oneDNN reads past the end of padded rows of odd length, and 0 * NaN is NaN
                difference = difference.contiguous()
            torch.mm(difference, weight, out=gradient[chunk])
    return results, gradient


def finish_rows_ref(
    logits: Tensor, targets: Tensor, bias: Tensor | None, temperature: float, scale: float, softcap: float | None,
    ignore_index: int, gradient_dtype: torch.dtype | None,
) -> Tensor:
    """Return (4, R): logprobs, entropy, m, log s of raw logits (R, V), which are overwritten; needs one more buffer of
    their size. With `gradient_dtype`, `packed_gradient(logits, gradient_dtype)` holds the gradient afterwards."""
    shape = LogitShape(temperature, scale, softcap, ignore_index)
    ignored = targets == ignore_index
    columns = targets.masked_fill(ignored, 0)[:, None]
    target = shape.apply_(logits, bias).gather(-1, columns)
    maximum = floor_(logits).amax(-1, keepdim=True)
    weights = logits.sub_(maximum).exp()
    total = weights.sum(-1, keepdim=True)
    log_sum = total.log()
    logprobs = (target - maximum - log_sum).squeeze(-1)
    entropy = log_sum.squeeze(-1) - row_dot(weights, logits) / total.squeeze(-1)
    if gradient_dtype is not None:
        difference = weights.div_(-total).scatter_add_(1, columns, torch.ones_like(total))
        difference.mul_(shape.slope_(logits, maximum)).masked_fill_(ignored[:, None], 0)
        packed_gradient(logits, gradient_dtype).copy_(difference)
    rows = logprobs.masked_fill_(ignored, 0), entropy.masked_fill_(ignored, 0)
    return torch.stack([*rows, maximum.squeeze(-1), log_sum.squeeze(-1)])


LAUNCH = Launch({"BLOCK_V": 2048}, num_warps=8, num_stages=1)  # one row per program, 8 entries per thread


@triton.jit
def logprob_rows_kernel(
    logits_ptr, gradient_ptr, results_ptr, targets_ptr, bias_ptr, R, V, logits_stride, gradient_stride,
    temperature, scale, softcap, ignore_index,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_GRADIENT: tl.constexpr, BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    target = tl.load(targets_ptr + row)
    kept = target != ignore_index
    target = tl.where(kept, target, 0)

    row_max, total, weighted = row_statistics(
        logits_ptr, bias_ptr, V, temperature, scale, softcap, HAS_BIAS, HAS_SOFTCAP, BLOCK_V
    )
    log_sum = tl.log(total)

    target_raw = tl.load(logits_ptr + target)
    target_bias = tl.load(bias_ptr + target).to(tl.float32) if HAS_BIAS else 0.0
    target_z, _ = shape_logits(target_raw, target_bias, scale, softcap, temperature, HAS_SOFTCAP)
    tl.store(results_ptr + row, tl.where(kept, target_z - row_max - log_sum, 0.0))
    tl.store(results_ptr + R + row, tl.where(kept, log_sum - weighted / total, 0.0))
    tl.store(results_ptr + 2 * R + row, row_max)
    tl.store(results_ptr + 3 * R + row, log_sum)

    if HAS_GRADIENT:
        gradient_ptr += row * gradient_stride
        lanes = tl.arange(0, BLOCK_V)
        for start in range(0, V, BLOCK_V):
            columns = start + lanes
            inside = columns < V
            raw = tl.load(logits_ptr + columns, mask=inside, other=0.0)
            # A narrower gradient is written over logits that other threads of this program may still be reading:
            # the bytes of block j lie within those of blocks 0..j, which every thread has read at this point.
            tl.debug_barrier()
            bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
            z, slope = shape_logits(raw, bias, scale, softcap, temperature, HAS_SOFTCAP)
            onehot = tl.where(columns == target, 1.0, 0.0)
            gradient = tl.where(kept, (onehot - tl.exp(z - row_max - log_sum)) * slope, 0.0)
            tl.store(gradient_ptr + columns, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)


def logprob_rows_triton(
    logits: Tensor, targets: Tensor, bias: Tensor | None, temperature: float, scale: float, softcap: float | None,
    ignore_index: int, gradient_dtype: torch.dtype | None,
) -> Tensor:
    """Launch the kernel, one program per row. Returns (4, N); with a dtype, the gradient overwrites the logits."""
    rows, vocabulary = logits.shape
    results = torch.empty(4, rows, dtype=logits.dtype, device=logits.device)
    gradient = packed_gradient(logits, gradient_dtype or logits.dtype)
    if rows:
        logprob_rows_kernel[(rows,)](
            logits, gradient, results, targets, logits if bias is None else bias, rows, vocabulary,
            logits.stride(0), gradient.stride(0), float(temperature), float(scale), float(softcap or 0), ignore_index,
            HAS_BIAS=bias is not None, HAS_SOFTCAP=bool(softcap), HAS_GRADIENT=gradient_dtype is not None,
            **LAUNCH.options,
        )
    return results


logprob_rows = custom_op(
    "logprob_rows", finish_rows_ref, logprob_rows_triton, mutates=("logits",),
    fake=lambda logits, *_: logits.new_empty(4, logits.shape[0]),
)


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    types = types_of_logits(logprob_rows_kernel, dtype, results_ptr="*fp32")
    return flagged("logprob_rows", logprob_rows_kernel, types, LAUNCH, ("HAS_BIAS", "HAS_SOFTCAP", "HAS_GRADIENT"))
