"""The kernels of one tile of logits (N, T), vocabulary entries first ... first + T - 1, in place: a 16-bit result fills
the first half of each row's bytes.

Forward: the tile updates each row's running maximum, sum, weighted sum and target, and becomes scaled exponentials.

    m' = max(m, max z);  decay = exp(m - m');  s' = decay s + sum exp(z - m')                (arXiv 1805.02867)
    t' = decay (t + s (m - m')) + sum exp(z - m') (z - m')           so that entropy = log s - t / s in the end
    logits <- exp(z - m') * slope                                    where the gradient is wanted

Backward: the gradient of a loss with respect to the logits. g, h: gradients of the log-probability and of the entropy
of each row; m, s: max z and sum exp(z - m) over the whole vocabulary.

    d = (g (onehot(target) - p) - h p (log p + entropy)) * slope,      log p = (z - m) - log s
"""

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import custom_op
from lowmem_grpo.kernels.logits import (
    FLOOR,
    LogitShape,
    floor_,
    floored,
    packed_gradient,
    row_dot,
    row_statistics,
    shape_logits,
    types_of_logits,
)
from lowmem_grpo.kernels.triton_utils import Launch, Variant, flagged, tl, triton

MAXIMUM, SUM, WEIGHTED, TARGET, SLOPE, DECAY = range(6)  # rows of the state (6, N)
LAUNCH = Launch({"BLOCK_V": 1024}, num_warps=4, num_stages=1)


def new_state(rows: int, like: Tensor) -> Tensor:
    """Return the state (6, rows) before the first tile."""
    state = torch.zeros(6, rows, dtype=like.dtype, device=like.device)
    state[MAXIMUM] = FLOOR.value
    return state


def update_state_ref(
    logits: Tensor, state: Tensor, targets: Tensor, bias: Tensor | None, temperature: float, scale: float,
    softcap: float | None, ignore_index: int, first: int, gradient_dtype: torch.dtype | None,
) -> None:
    """Update the state (6, N) with raw logits (N, T) of the entries from `first` on; bias (T,) is theirs."""
    shape = LogitShape(temperature, scale, softcap, ignore_index)
    columns = (targets - first).clamp(0, logits.shape[1] - 1)[:, None]
    here = columns.squeeze(-1) + first == targets
    shape.apply_(logits, bias)
    state[TARGET] = torch.where(here, logits.gather(-1, columns).squeeze(-1), state[TARGET])
    maximum = torch.maximum(state[MAXIMUM], floor_(logits).amax(-1))
    shift = state[MAXIMUM] - maximum
    weights = logits.sub_(maximum[:, None]).exp()
    state[DECAY] = shift.exp()
    state[WEIGHTED] = state[DECAY] * (state[WEIGHTED] + state[SUM] * shift) + row_dot(weights, logits)
    state[SUM] = state[DECAY] * state[SUM] + weights.sum(-1)
    state[MAXIMUM] = maximum
    slope = shape.slope_(logits, maximum[:, None])
    target_slope = slope.gather(-1, columns).squeeze(-1) if isinstance(slope, Tensor) else torch.tensor(slope)
    state[SLOPE] = torch.where(here, target_slope, state[SLOPE])
    if gradient_dtype is not None:
        packed_gradient(logits, gradient_dtype).copy_(weights.mul_(slope))


@triton.jit
def logprob_tile_fwd_kernel(
    logits_ptr, gradient_ptr, state_ptr, targets_ptr, bias_ptr, N, T, first, logits_stride, gradient_stride,
    temperature, scale, softcap, ignore_index,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_GRADIENT: tl.constexpr, BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    state_ptr += row  # entry k of this row lies at k * N
    tile_max, tile_sum, tile_weighted = row_statistics(
        logits_ptr, bias_ptr, T, temperature, scale, softcap, HAS_BIAS, HAS_SOFTCAP, BLOCK_V
    )
    old_max = tl.load(state_ptr)
    old_sum = tl.load(state_ptr + N)
    old_weighted = tl.load(state_ptr + 2 * N)
    new_max = tl.maximum(old_max, tile_max)
    decay = tl.exp(old_max - new_max)
    tile_decay = tl.exp(tile_max - new_max)
    weighted = decay * (old_weighted + old_sum * (old_max - new_max))
    weighted += tile_decay * (tile_weighted + tile_sum * (tile_max - new_max))

    column = tl.load(targets_ptr + row) - first
    here = (column >= 0) & (column < T)
    target_raw = tl.load(logits_ptr + column, mask=here, other=0.0)
    target_bias = tl.load(bias_ptr + column, mask=here, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    target_z, target_slope = shape_logits(target_raw, target_bias, scale, softcap, temperature, HAS_SOFTCAP)
    tl.store(state_ptr, new_max)
    tl.store(state_ptr + N, decay * old_sum + tile_decay * tile_sum)
    tl.store(state_ptr + 2 * N, weighted)
    tl.store(state_ptr + 3 * N, target_z, mask=here)
    tl.store(state_ptr + 4 * N, target_slope, mask=here)
    tl.store(state_ptr + 5 * N, decay)

    if HAS_GRADIENT:
        gradient_ptr += row * gradient_stride
        lanes = tl.arange(0, BLOCK_V)
        for start in range(0, T, BLOCK_V):
            columns = start + lanes
            inside = columns < T
            raw = tl.load(logits_ptr + columns, mask=inside, other=0.0)
            tl.debug_barrier()  # see logprob_rows_kernel: a narrower result is written over bytes that all have read
            bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
            z, slope = shape_logits(raw, bias, scale, softcap, temperature, HAS_SOFTCAP)
            weight = tl.exp(z - new_max) * slope
            tl.store(gradient_ptr + columns, weight.to(gradient_ptr.dtype.element_ty), mask=inside)


def logprob_tile_fwd_triton(
    logits: Tensor, state: Tensor, targets: Tensor, bias: Tensor | None, temperature: float, scale: float,
    softcap: float | None, ignore_index: int, first: int, gradient_dtype: torch.dtype | None,
) -> None:
    """Update the running `state` with one tile of logits (N, W), from column `first` on."""
    rows, columns = logits.shape
    gradient = packed_gradient(logits, gradient_dtype or logits.dtype)
    if rows:
        logprob_tile_fwd_kernel[(rows,)](
            logits, gradient, state, targets, logits if bias is None else bias, rows, columns, first,
            logits.stride(0), gradient.stride(0), float(temperature), float(scale), float(softcap or 0), ignore_index,
            HAS_BIAS=bias is not None, HAS_SOFTCAP=bool(softcap), HAS_GRADIENT=gradient_dtype is not None,
            **LAUNCH.options,
        )


logprob_tile_fwd = custom_op("logprob_tile_fwd", update_state_ref, logprob_tile_fwd_triton, mutates=("logits", "state"))


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
    forward = types_of_logits(logprob_tile_fwd_kernel, dtype, state_ptr="*fp32")
    rows = ("maximum_ptr", "log_sum_ptr", "entropy_ptr", "grad_logprobs_ptr", "grad_entropy_ptr")
    backward = types_of_logits(logprob_tile_bwd_kernel, dtype, **dict.fromkeys(rows, "*fp32"))
    flags = ("HAS_BIAS", "HAS_SOFTCAP")
    return [*flagged("logprob_tile_fwd", logprob_tile_fwd_kernel, forward, LAUNCH, (*flags, "HAS_GRADIENT")),
            *flagged("logprob_tile_bwd", logprob_tile_bwd_kernel, backward, LAUNCH, (*flags, "HAS_ENTROPY"))]
