"""From rewards to advantages. P prompts, G completions of a prompt, R reward functions; NaN marks "no reward"."""

import torch
from torch import Tensor

from lowmem_grpo.types import RolloutGroup

SCALE_REWARDS = ("group", "batch", "none")
STD_EPSILON = 1e-4  # TRL's


def combine_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum (P, G) of rewards (P, G, R); a completion that no function scored stays NaN."""
    unscored = rewards.isnan().all(-1)
    return (rewards * weights).nansum(-1).masked_fill(unscored, torch.nan)


def group_advantages(rewards: Tensor, scale_rewards: str) -> Tensor:
    """A = (r - mean of the group) / (std + 1e-4), shape (P, G) (DeepSeekMath, section 4.1.2).

    The unbiased std is taken over the group or over the batch; with "none" nothing is divided (Dr. GRPO). Completions
    without a reward are left out of mean and std, and get advantage 0.
    """
    if scale_rewards not in SCALE_REWARDS:
        raise ValueError(f"scale_rewards is {scale_rewards!r}; allowed are {', '.join(SCALE_REWARDS)}")
    highest, lowest = rewards.nan_to_num(nan=-torch.inf).amax(-1), rewards.nan_to_num(nan=torch.inf).amin(-1)
    centered = rewards - rewards.nanmean(-1, keepdim=True)
    centered = centered.masked_fill((highest == lowest)[:, None], 0.0)  # exactly 0, whatever the mean rounded to
    if scale_rewards == "group":
        centered = centered / (nanstd(rewards, dim=-1)[:, None] + STD_EPSILON)
    elif scale_rewards == "batch":
        centered = centered / (nanstd(rewards.flatten(), dim=-1) + STD_EPSILON)
    return centered.nan_to_num(nan=0.0)


def nanstd(values: Tensor, dim: int) -> Tensor:
    """Unbiased standard deviation of the values that are not NaN; 0 for a single one, NaN for none."""
    count = values.isnan().logical_not().sum(dim)
    squares = (values - values.nanmean(dim, keepdim=True)).square().nansum(dim)
    return (squares / (count - 1).clamp(min=1)).sqrt().masked_fill(count == 0, torch.nan)


def assign_advantages(
    groups: list[RolloutGroup], names: list[str], weights: list[float] | None, scale_rewards: str
) -> None:
    """Set `reward` (the weighted sum of the named rewards) and `advantage` of every rollout of equally large groups."""
    rows = [[[rollout.rewards[name] for name in names] for rollout in group.rollouts] for group in groups]
    scored = [[[torch.nan if value is None else value for value in r] for r in group] for group in rows]
    table = torch.tensor(scored, dtype=torch.float64)  # (P, G, R)
    rewards = combine_rewards(table, torch.tensor(weights or [1.0] * len(names), dtype=torch.float64))
    advantages = group_advantages(rewards, scale_rewards)
    for group, sums, values in zip(groups, rewards.tolist(), advantages.tolist(), strict=True):
        for rollout, reward, advantage in zip(group.rollouts, sums, values, strict=True):
            rollout.reward = None if reward != reward else reward
            rollout.advantage = advantage
