"""Turns one tile of logits, in place, into the gradient of a loss with respect to them.

    d = (g (onehot(target) - p) - h p (log p + entropy)) * slope,      log p = (z - m) - log s

g, h: gradients of the log-probability and of the entropy of each row; m, s: max z and sum exp(z - m) over all of it. N
rows, T columns, the vocabulary entries first ... first + T - 1. A 16-bit result fills the first half of a row's bytes.
"""

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import custom_op
from lowmem_grpo.kernels.logits import LogitShape, floor_, floored, packed_gradient, shape_logits, types_of_logits
from lowmem_grpo.kernels.triton_utils import Launch, Variant, flagged, tl, triton

LAUNCH = Launch({"BLOCK_V": 1024}, num_warps=4, num_stages=1)


def differentiate_ref(
    logits: Tensor, targets: Tensor, bias: Tensor | None, maximum: Tensor, log_sum: Tensor, entropy: Tensor,
    grad_logprobs: Tensor, grad_entropy: Tensor | None, temperature: float, scale: float, softcap: float | None,
    ignore_index: int, first: int, gradient_dtype: torch.dtype,
) -> None:
    """Raw logits (N, T) of the entries from `first` on become d, in `packed_gradient`'s place; bias (T,) is theirs. One
    more buffer of the size of the logits, two for an entropy gradient."""
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
    """The same by the kernel."""
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
    """Every configuration of the kernel for heads of `dtype`."""
    rows = ("maximum_ptr", "log_sum_ptr", "entropy_ptr", "grad_logprobs_ptr", "grad_entropy_ptr")
    types = types_of_logits(logprob_tile_bwd_kernel, dtype, **dict.fromkeys(rows, "*fp32"))
    flags = ("HAS_BIAS", "HAS_SOFTCAP", "HAS_ENTROPY")
    return flagged("logprob_tile_bwd", logprob_tile_bwd_kernel, types, LAUNCH, flags)
