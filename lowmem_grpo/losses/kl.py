"""Estimates of KL(policy || reference) per token, from d = logp - ref_logp on the policy's samples (Schulman, 2020).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lowmem_grpo.losses.loss_types import held
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
    return excess(ref_logprobs - logprobs)


NEAR, TERMS = 0.1, 11  # |x| below which the series is used, and its last power: all digits of a float64


def excess(x: Tensor) -> Tensor:
    """Return exp(x) - 1 - x, of the shape of x; near 0 by its series, as the differences would lose every digit."""
    near = x.abs() < NEAR
    small = torch.where(near, x, 0.0)
    series = torch.ones_like(small)
    for power in range(TERMS, 2, -1):
        series = 1 + small / power * series
    return torch.where(near, small.square() / 2 * series, torch.expm1(x) - x)


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
