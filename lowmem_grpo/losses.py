"""Policy losses as plain elementwise maths on aligned tokens (N,): torch alone, any autograd on top.

    ratio_t = exp(logp_t - old_logp_t)                                              (DeepSeekMath, eq. 3)
    l_t = -min(min(ratio_t, delta) A, clip(ratio_t, 1 - epsilon, 1 + epsilon_high) A) + beta KL_t
    KL_t = exp(ref_t - logp_t) - (ref_t - logp_t) - 1                               (k3, DeepSeekMath, eq. 4)
    loss = sum_t weight_t l_t

`delta` bounds the ratio where A < 0 (two-sided clipping, INTELLECT-2); None leaves it out. The loss types differ in
weight_t alone, and its denominators always count the whole step, so that neither the split into micro-batches nor
their order can change the gradient:

    grpo      1 / (tokens of this sequence * sequences of the step)                 (DeepSeekMath)
    bnpo      1 / tokens of the step
    dapo      1 / tokens of the step; with several optimizer steps per generation, their mean count (DAPO, eq. 8)
    dr_grpo   1 / (sequences of the step * max_completion_length)                   (Dr. GRPO)
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lowmem_grpo.types import LossOutput


def weights_grpo(sequence_lengths: Tensor, num_sequences: int, **_: float) -> Tensor:
    """A mean over sequences of means over tokens."""
    return 1 / (sequence_lengths * num_sequences)


def weights_token_mean(sequence_lengths: Tensor, num_tokens: float, **_: float) -> Tensor:
    """A mean over all tokens of the step."""
    return torch.full_like(sequence_lengths, 1 / max(num_tokens, 1))


def weights_dr_grpo(sequence_lengths: Tensor, num_sequences: int, max_completion_length: int, **_: float) -> Tensor:
    """A sum over tokens divided by a constant, free of length bias."""
    return torch.full_like(sequence_lengths, 1 / (num_sequences * max_completion_length))


LOSS_TYPES: dict[str, Callable[..., Tensor]] = {
    "grpo": weights_grpo,
    "bnpo": weights_token_mean,
    "dr_grpo": weights_dr_grpo,
    "dapo": weights_token_mean,
}


def grpo_loss(
    logprobs: Tensor, advantages: Tensor, sequence_ids: Tensor, *, loss_type: str, num_sequences_in_step: int,
    num_tokens_in_step: float, max_completion_length: int, old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None, epsilon: float = 0.2, epsilon_high: float | None = None,
    delta: float | None = None, beta: float = 0.0, use_bias_correction_kl: bool = False,
) -> LossOutput:
    """The share of the step's loss that the given tokens (N,) carry; shares of all micro-batches add up to the loss.

    Every sequence lies whole in one call: its length is counted from `sequence_ids` (N,). Without `old_logprobs`
    the data is on-policy and the ratio is exactly 1. Raises ValueError for an unknown loss type, and for a KL term
    without reference log-probabilities.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type is {loss_type!r}; allowed are {', '.join(LOSS_TYPES)}")
    if beta and ref_logprobs is None:
        raise ValueError(f"beta is {beta}, which needs ref_logprobs; pass them, or set beta=0")
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    ratio = torch.exp(logprobs - old_logprobs)
    per_token = clipped_objective(ratio, advantages, epsilon, epsilon_high, delta).neg()
    metrics = clip_metrics(ratio.detach(), advantages, sequence_ids, epsilon, epsilon_high, delta)
    if beta:
        kl = k3(logprobs, ref_logprobs) * (ratio if use_bias_correction_kl else 1.0)
        per_token = per_token + beta * kl
        metrics["kl"] = kl.detach().mean()
    lengths = torch.bincount(sequence_ids)[sequence_ids].to(per_token.dtype)
    weights = LOSS_TYPES[loss_type](
        lengths, num_sequences=num_sequences_in_step, num_tokens=num_tokens_in_step,
        max_completion_length=max_completion_length,
    )
    return LossOutput((per_token * weights).sum(), metrics)


def clipped_objective(
    ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float, delta: float | None
) -> Tensor:
    """min(min(ratio, delta) A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A), shape (N,)."""
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return torch.min(bounded * advantages, ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantages)


def k3(logprobs: Tensor, ref_logprobs: Tensor | None) -> Tensor:
    """The k3 estimate of KL(policy || reference) per token: unbiased, never negative (Schulman, 2020)."""
    assert ref_logprobs is not None
    difference = ref_logprobs - logprobs
    return torch.exp(difference) - difference - 1


def clip_metrics(
    ratio: Tensor, advantages: Tensor, sequence_ids: Tensor, epsilon: float, epsilon_high: float, delta: float | None
) -> dict[str, Tensor]:
    """Shares of tokens whose gradient the clipping took, over all tokens and as extremes over sequences (TRL)."""
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    low = (bounded < 1 - epsilon) & (advantages < 0)
    high = (bounded > 1 + epsilon_high) & (advantages > 0)
    shares = {"low_mean": low, "high_mean": high, "region_mean": low | high}
    metrics = {f"clip_ratio/{name}": clipped.to(ratio.dtype).mean() for name, clipped in shares.items()}
    if len(ratio):
        metrics["clip_ratio/low_min"] = sequence_means(low, sequence_ids).min()
        metrics["clip_ratio/high_max"] = sequence_means(high, sequence_ids).max()
    return metrics


def sequence_means(clipped: Tensor, sequence_ids: Tensor) -> Tensor:
    """Share of True tokens in each sequence that has tokens."""
    counts = torch.bincount(sequence_ids)
    sums = torch.bincount(sequence_ids, weights=clipped.to(torch.float32))
    return (sums / counts)[counts > 0]
