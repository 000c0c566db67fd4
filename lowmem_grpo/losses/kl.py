"""Estimates of KL(policy || reference) per token, from d = logp - ref_logp on the policy's samples (Schulman, 2020).
"""

from collections.abc import Callable

import torch
from torch import Tensor


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d: unbiased, of high variance. Weighed by the ratio its gradient is the KL's own; without, it has none on
    average."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d^2 / 2: biased, and its gradient is that of k1 in the reward."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased, never negative (DeepSeekMath, eq. 4)."""
    difference = ref_logprobs - logprobs
    return torch.exp(difference) - difference - 1


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
