"""Estimates of KL(policy || reference) per token, from d = logp - ref_logp on the policy's samples (Schulman, 2020).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lowmem_grpo.losses.loss_types import held, k3_of
from lowmem_grpo.utils import torch

if TYPE_CHECKING:
    from torch import Tensor


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return d: unbiased, of high variance. Its gradient is the KL's own only if it is weighted by the ratio."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return d^2 / 2: biased; its gradient is that of k1 in the reward."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d: unbiased, never negative (DeepSeekMath, eq. 4)."""
    return k3_of(ref_logprobs - logprobs)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def weighed_kl(name: str, logprobs: Tensor, ref_logprobs: Tensor, log_weight: Tensor, of_token: bool = True) -> Tensor:
    """Return the estimate times w = exp(log_weight), (N,), finite if the product is; `of_token`: w grows with logp."""
    difference = ref_logprobs - logprobs
    far = (difference > 1) & (name == "k3")
    estimate = KL_ESTIMATORS[name](logprobs, torch.where(far, logprobs.detach(), ref_logprobs))
    near = estimate * held(log_weight, estimate == 0).exp()
    if name != "k3":
        return near
    log_weight, difference = torch.where(far, log_weight, 0.0), torch.where(far, difference, 0.0)
    both = log_weight + difference
    product = (both.detach() if of_token else both).exp() - log_weight.exp() * (1 + difference)
    return torch.where(far, product, near)
