"""PPO's values (arXiv 1506.02438, 1707.06347): advantages from a critic, and the critic's loss.

    delta_t = r_t + gamma V_{t+1} - V_t        A_t = sum_k (gamma lam)^k delta_{t+k}        R_t = A_t + V_t

t counts the tokens that the policy sampled in one rollout, V_t is the value of the state before token t, and the value
after the last token is 0. All is computed in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowmem_grpo.losses.advantages import STD_EPSILON, batch_std
from lowmem_grpo.utils import torch

if TYPE_CHECKING:
    from torch import Tensor


def gae(rewards: Tensor, values: Tensor, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """Return the advantages A (N,) of a rollout's N sampled tokens, on the host, from their rewards and values (N,).
    Returns are A + `values`. A value or reward that is NaN makes this token's and all earlier advantages NaN."""
    following, advantage, backwards = 0.0, 0.0, []
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        backwards.append(advantage)
    return torch.tensor(backwards[::-1], dtype=torch.float64)


def whitened(values: Tensor, mask: Tensor | None = None, center: bool = True) -> Tensor:
    """Return values (N,) with mean 0 and standard deviation 1 over those that are finite and in `mask` (N,) bool; the
    others are NaN. Without `center` the mean stays."""
    counted = values.isfinite() if mask is None else values.isfinite() & mask
    values = torch.where(counted, values.double(), torch.nan)
    mean = values.nanmean()
    return (values - mean) / (batch_std(values) + STD_EPSILON) + (0.0 if center else mean)


def value_losses(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the losses (N,) of values (N,), and as (N,) bool which of them the bound `clip` decides:

        0.5 max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2)

    A token whose return is NaN or infinite has loss 0 and no gradient."""
    known = returns.isfinite()
    targets = torch.where(known, returns.double(), 0.0)
    current, old = torch.where(known, values.double(), 0.0), old_values.double()
    losses = (current - targets).square() / 2
    if clip is None:
        return losses.to(values.dtype), torch.zeros_like(known)
    bounded = torch.maximum(torch.minimum(current, old + clip), old - clip)
    of_bounded = (torch.where(known, bounded, 0.0) - targets).square() / 2
    decides = of_bounded > losses
    return torch.where(decides, of_bounded, losses).to(values.dtype), decides


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(R - V) / Var(R) over the tokens (N,) where both are finite: 1 if values foretell the returns, 0 if
    they are no better than a constant. NaN if the returns do not differ."""
    known = values.isfinite() & returns.isfinite()
    values, returns = values[known].double(), returns[known].double()
    spread = returns.var(correction=0).item() if len(returns) else 0.0
    return 1 - (returns - values).var(correction=0).item() / spread if spread > 0 else float("nan")
