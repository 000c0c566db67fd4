"""Corrections for samples of a policy other than the one in training, as weights on a token's policy term.

    mu: the sampler, pi_old: the trainer at the start of the update, pi: the policy in training
    d_t = log pi_old(t) - log mu(t),   rho_t = exp(d_t)                      the sampler's mismatch and its staleness
    loss = sum_t weight_t sg(c_t) l_t                                  l_t has the ratio pi / pi_old (policy_loss.py)

If the trainer recomputes log pi_old, this is decoupled PPO (Hilton et al., 2021; AReaL). A product of ratios over a
sequence drops long completions (1.012^100 is 3.3), so that a correction over sequences is never a default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowmem_grpo.losses.loss_types import k3_of, sequence_means, sequence_sums
from lowmem_grpo.losses.loss_types import ratio as ratio_of
from lowmem_grpo.utils import torch

if TYPE_CHECKING:
    from torch import Tensor

Bounds = tuple[float | None, float | None]


@dataclass(frozen=True)
class Correction:
    """A way to weight off-policy tokens. Its functions are for the code, its texts for the documentation."""

    measured: Callable[[Tensor, Tensor, Tensor], Tensor]  # (d_t (N,), sequence ids, lengths) -> the bounded values
    bounded: Callable[[Tensor, Bounds], Tensor]
    formula: str
    when: str
    source: str
    per_sequence: bool = False  # one weight for all tokens of a sequence


def truncated(ratio: Tensor, bounds: Bounds) -> Tensor:
    return ratio if bounds == (None, None) else ratio.clamp(*bounds)


def masked(ratio: Tensor, bounds: Bounds) -> Tensor:
    return torch.where(inside(ratio, bounds), ratio, 0.0)


def kept(values: Tensor, bounds: Bounds) -> Tensor:
    return inside(values, bounds).to(values.dtype)


def inside(values: Tensor, bounds: Bounds) -> Tensor:
    """Return a bool of the shape of `values`, True within the bounds. Bounds are inclusive; None is no bound."""
    low, high = bounds
    within = torch.ones_like(values, dtype=torch.bool)
    within = within if low is None else within & (values >= low)
    return within if high is None else within & (values <= high)


def sequence_product(mismatch: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    """Return the product of each sequence's ratios, (S,)."""
    return ratio_of(sequence_sums(mismatch, ids, len(lengths)))


def mean_k3(ratio: Tensor) -> float:
    """Return the mean of `k3_of` over ratios rho (N,); 0 if there are none."""
    return k3_of(ratio.log()).mean().item() if ratio.numel() else 0.0


CORRECTIONS: dict[str, Correction] = {
    "token_truncate": Correction(
        lambda mismatch, *_: ratio_of(mismatch), truncated, "c_t = min(max(rho_t, clip_min), clip_max)",
        "The default. The upper bound limits the variance, and no completion is left out.",
        "Truncated importance sampling (TIS); verl",
    ),
    "token_mask": Correction(
        lambda mismatch, *_: ratio_of(mismatch), masked, "c_t = rho_t if clip_min <= rho_t <= clip_max, else 0",
        "For a few tokens with extreme ratios, as in mixtures of experts. IcePop's bounds are 0.5 and 5. Not for gspo, "
        "gmpo, rloo or importance_sampling_level='sequence'.",
        "Masked importance sampling (MIS); IcePop (Ring-1T), arXiv 2510.18855",
    ),
    "sequence_truncate": Correction(
        sequence_product, truncated, "c = min(max(prod_t rho_t, clip_min), clip_max)",
        "For short completions only, because the product grows or vanishes with length.", "TRL", True,
    ),
    "sequence_mask": Correction(
        sequence_product, masked, "c = prod_t rho_t if clip_min <= prod_t rho_t <= clip_max, else 0",
        "The default of TRL. Long completions are the first to get the weight 0.", "TRL", True,
    ),
    "geometric_mask": Correction(
        lambda mismatch, ids, lengths: sequence_means(mismatch, ids, lengths).exp(), kept,
        "c = 1 if clip_min <= exp(mean_t(log rho_t)) <= clip_max, else 0",
        "Leaves out completions that have drifted, whatever their length. Set both bounds. In bfloat16, 0.95 and "
        "1.05 keep healthy completions of 16 tokens or more, and 0.98 and 1.02 of 256 or more; in float16, 0.99 and "
        "1.01.",
        "Geometric rejection, verl", True,
    ),
    "k3_mask": Correction(
        lambda mismatch, ids, lengths: sequence_means(k3_of(mismatch), ids, lengths), kept,
        "c = 1 if mean_t(rho_t - log rho_t - 1) <= clip_max, else 0",
        "Like geometric_mask, but deviations of opposite sign do not cancel. "
        "Set a small clip_max: in bfloat16, 0.01 keeps healthy completions of 16 tokens or more (0.001 drops about "
        "half); in float16, 0.001 does.",
        "K3 rejection, verl", True,
    ),
}


def correction_weights(
    mode: str, old_logprobs: Tensor, rollout_logprobs: Tensor, sequence_ids: Tensor, lengths: Tensor, bounds: Bounds
) -> Tensor:
    """Return weights c (N,) without gradient, from log-probabilities (N,) of the trainer and of the sampler."""
    mismatch = (old_logprobs - rollout_logprobs).detach()
    correction = CORRECTIONS[mode]
    weights = correction.bounded(correction.measured(mismatch, sequence_ids, lengths), bounds)
    return weights[sequence_ids] if correction.per_sequence else weights


def off_policy_sequence_mask(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, sequence_ids: Tensor, lengths: Tensor,
    threshold: float,
) -> Tensor:
    """Return (N,) bool: False for tokens of a bad completion (A < 0) from which the policy has moved away by more than
    `threshold` on average: mean_t(log mu - log pi) (DeepSeek-V3.2, arXiv 2512.02556, eq. 9)."""
    drift = sequence_means((rollout_logprobs - logprobs).detach(), sequence_ids, lengths)[sequence_ids]
    return (advantages >= 0) | (drift <= threshold)


@dataclass
class MismatchWatch:
    """A rule for when a correction is due: for stale samples, and from a mean k3 above `bound` until one that is at
    most half of it, so that values near the bound do not switch it on and off."""

    bound: float = 1e-3  # in a run, the dtype's `k3_bound`
    last_k3: float | None = None
    large: bool = False  # whether the mismatch was above the bound, and not far below it since

    def due(self, stale: bool) -> bool:
        """Take in the last mean k3, and return whether this update is to be corrected."""
        if self.last_k3 is not None:
            self.large = not self.last_k3 <= (self.bound / 2 if self.large else self.bound)
        return stale or self.large


def k3_bound(dtype: torch.dtype) -> float:
    """Return the mean k3 above which sampler and trainer differ by more than the rounding of `dtype`. Measured on
    SmolLM2-135M-Instruct (bench/LOG.md): at most 0.0023 in bfloat16, 0.00002 in float16, 0 in float32."""
    return 5e-3 if dtype == torch.bfloat16 else 1e-3
