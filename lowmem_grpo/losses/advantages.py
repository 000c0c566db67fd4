"""From rewards to advantages. P prompts, G completions of a prompt, R reward functions; NaN marks "no reward"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lowmem_grpo.utils import FINITE, NUMBERS, TRUTH, Rule, check_ranges, one_of, torch

if TYPE_CHECKING:
    from torch import Tensor

    from lowmem_grpo.types import RolloutGroup

SCALE_REWARDS = ("group", "batch", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
STD_EPSILON = 1e-4  # TRL's
GAE = "gae"


def combine_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return weighted sums (P, G) of rewards (P, G, R). A completion that no function scored stays NaN."""
    unscored = rewards.isnan().all(-1)
    return (rewards * weights).nansum(-1).masked_fill(unscored, torch.nan)


def without_metrics_alone(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return rewards (..., R) with NaN for completions that only functions of weight 0 (metrics) scored."""
    return rewards.masked_fill((rewards.isnan() | (weights == 0)).all(-1, keepdim=True), torch.nan)


def centered(rewards: Tensor) -> Tensor:
    """Return rewards (P, G) minus their group's mean. If a group's rewards are all equal, this is exactly 0."""
    highest, lowest = rewards.nan_to_num(nan=-torch.inf).amax(-1), rewards.nan_to_num(nan=torch.inf).amin(-1)
    equal = (highest == lowest)[:, None] & ~rewards.isnan()
    return (rewards - rewards.nanmean(-1, keepdim=True)).masked_fill(equal, 0.0)


def nanstd(values: Tensor, dim: int) -> Tensor:
    """Return the unbiased standard deviation of the values that are not NaN. It is 0 for one value, NaN for none."""
    count = values.isnan().logical_not().sum(dim)
    squares = (values - values.nanmean(dim, keepdim=True)).square().nansum(dim)
    return (squares / (count - 1).clamp(min=1)).sqrt().masked_fill(count == 0, torch.nan)


def batch_std(values: Tensor) -> Tensor:
    return nanstd(values.flatten(), dim=-1)


# The estimators: (rewards (P, G), scale, baselines (P,) | None, k) -> advantages (P, G), NaN where there is no reward.


def of_group(rewards: Tensor, scale: str, baselines: Tensor | None, k: int) -> Tensor:
    """Subtract the group's mean. Divide by the std of the group or of the batch, as `scale` says, or not at all."""
    if scale == "none":
        return centered(rewards)
    std = nanstd(rewards, dim=-1)[:, None] if scale == "group" else batch_std(rewards)
    return centered(rewards) / (std + STD_EPSILON)


def leave_one_out(rewards: Tensor, scale: str, baselines: Tensor | None, k: int) -> Tensor:
    """Subtract the mean of the group's other rewards. This equals the centered reward times n / (n - 1)."""
    scored = rewards.isnan().logical_not().sum(-1, keepdim=True)
    return centered(rewards) * scored / (scored - 1).clamp(min=1)


def of_batch(rewards: Tensor, scale: str, baselines: Tensor | None, k: int) -> Tensor:
    """Subtract the mean of the batch and divide by its std."""
    return centered(rewards.reshape(1, -1)).view_as(rewards) / (batch_std(rewards) + STD_EPSILON)


def of_batch_and_group(rewards: Tensor, scale: str, baselines: Tensor | None, k: int) -> Tensor:
    """Subtract the group's mean, then divide by the std of these differences over the batch."""
    return centered(rewards) / (batch_std(centered(rewards)) + STD_EPSILON)


def over_greedy(rewards: Tensor, scale: str, baselines: Tensor | None, k: int) -> Tensor:
    """Subtract the reward of the prompt's greedy completion; ValueError without baselines."""
    if baselines is None:
        raise ValueError("remax needs the reward of a greedy completion of each prompt; pass baselines (P,)")
    return rewards - baselines[:, None]


def for_critic(rewards: Tensor, scale: str, baselines: Tensor | None, k: int) -> Tensor:
    """Return the rewards. The advantages of tokens follow once the critic's values are known (`trainer/critic.py`)."""
    return rewards


def pass_at_k(rewards: Tensor, scale: str, baselines: Tensor | None, k: int) -> Tensor:
    """Return each completion's gain for the best of k, over subsets of its group: E[max | it is in] - E[max]. Scale
    "group" divides by the std of the best; for rewards of 0 and 1 this is the closed form of arXiv 2508.10751."""
    rows = [best_of_k(row, k, scale == "group") for row in rewards]
    return torch.stack(rows)


def best_of_k(rewards: Tensor, k: int, scaled: bool) -> Tensor:
    """Return `pass_at_k` of one group (G,)."""
    scored = rewards.isnan().logical_not()
    values, order = rewards[scored].sort()
    count = len(values)
    if count < 2:
        return rewards * 0.0
    k = min(k, count)
    values = values - values[0]  # changes no gain, and keeps its rounding error relative to the spread
    place = torch.arange(count)
    best = choose(place, k - 1) / choose(torch.tensor(count), k)  # P(the j-th is the best of k)
    mean = (best * values).sum()
    own = choose(place, k - 1) / choose(torch.tensor(count - 1), k - 1)  # P(the j-th is best | it is in)
    other = choose(place - 1, k - 2) / choose(torch.tensor(count - 1), k - 1)  # P(the j-th is best | a lower one is in)
    above = (other * values).flip(0).cumsum(0).flip(0) - other * values
    gain = own * values + above - mean
    gain = gain * (gain.abs() > 1e-9 * values[-1])  # exactly 0 where all subsets have the same best
    std = ((best * values.square()).sum() - mean.square()).clamp(min=0).sqrt()
    advantages = torch.full_like(rewards, torch.nan)
    gain = gain / (std + STD_EPSILON) if scaled else gain
    advantages[scored.nonzero().squeeze(-1)[order]] = gain.to(rewards.dtype)
    return advantages


def choose(n: Tensor, k: int) -> Tensor:
    """Return the binomial coefficient C(n, k) in float64; 0 unless 0 <= k <= n."""
    if k < 0:
        return torch.zeros(n.shape, dtype=torch.float64)
    top = n.double().clamp(min=k)
    logs = torch.lgamma(top + 1) - torch.lgamma(top - k + 1) - torch.lgamma(torch.tensor(k + 1.0).double())
    return logs.exp().masked_fill(n < k, 0.0)


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator: the function that the code calls and the texts that the documentation shows."""

    function: Callable[[Tensor, str, Tensor | None, int], Tensor]
    scales: tuple[str, ...]  # accepted values of scale_rewards, the default first
    formula: str
    when: str
    source: str


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(
        of_group, SCALE_REWARDS, "A = (R - mean_group(R)) / std_group(R)",
        "The default. scale_rewards='batch' divides by std_batch(R); 'none' does not divide, as in Dr. GRPO.",
        "DeepSeekMath, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783",
    ),
    "rloo": Estimator(
        leave_one_out, (), "A = R - mean of R over the other completions of the group",
        "Unbiased, even with few completions per prompt.", "RLOO, arXiv 2402.14740",
    ),
    "reinforce++": Estimator(
        of_batch, (), "A_t = zscore_batch(R - beta sum_{s >= t} KL_s)",
        "For rewards comparable between prompts. KL_s is the estimate k1 at token s.", "REINFORCE++, arXiv 2501.03262",
    ),
    "reinforce++_baseline": Estimator(
        of_batch_and_group, (), "A = (R - mean_group(R)) / std_batch(R - mean_group(R))",
        "For prompts of different difficulty. The paper sets kl_estimator='k2'.", "REINFORCE++, arXiv 2501.03262",
    ),
    "remax": Estimator(
        over_greedy, (), "A = R - R(greedy completion of the prompt)",
        "For few completions per prompt. Each prompt costs one extra completion.",
        "ReMax, arXiv 2310.10505",
    ),
    "passk": Estimator(
        pass_at_k, ("group", "none"), "A_i = (E[best of k | i is one of the k] - E[best of k]) / std(best of k)",
        "For exploration: the fewer right completions a group has, the larger are their advantages. pass_at_k sets k "
        "(default: half of the group).",
        "Pass@k training, arXiv 2508.10751; PKPO, arXiv 2505.15201",
    ),
    GAE: Estimator(
        for_critic, (), "A_t = zscore_batch(sum_{s >= t} (gamma lam)^(s - t) (r_s + gamma V_{s+1} - V_s))",
        "PPO. V_t is a critic's value of the text before token t, r_t is R (less beta KL_t) at the last token, and in "
        "an episode each turn's reward is at the turn's last token. Works with num_generations=1. The critic is a "
        "second adapter on the same base. Settings: gamma, lam, cliprange_value, critic_learning_rate, "
        "critic_warmup_steps, critic_adapter, whiten_advantages, whiten_rewards.",
        "GAE, arXiv 1506.02438; PPO, arXiv 1707.06347",
    ),
}
TRUTHS: dict[Any, str] = {True: "group", False: "none", "True": "group", "true": "group", "False": "none",
                          "false": "none"}  # scale_rewards of older versions of TRL
COMPARING = ("grpo", "rloo", "reinforce++_baseline")  # estimators that compare a reward with its group's mean

UNGROUPED = ("reinforce++", "remax", GAE)  # estimators for which one completion of a prompt is enough


@dataclass(kw_only=True)
class AdvantageSettings:
    """Settings that turn rewards into advantages."""

    advantage_estimator: str = "grpo"
    """Not in TRL: one of ESTIMATORS."""
    scale_rewards: str | None = None  # one type, for argument parsers; True and False are accepted too
    """What a group's centered rewards are divided by: the std of the "group" (default) or "batch", or "none"."""
    reward_weights: list[float] | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    """"normalize_then_sum" normalises each reward function by itself first (GDPO, arXiv 2601.05242)."""
    pass_at_k: int | None = None
    """Not in TRL: the k of advantage_estimator="passk"; None is half of the group."""
    normalize_advantages: bool = False
    """As in TRL's RLOOConfig: the advantages of a generation get the mean 0 and the std 1."""
    reward_clip_range: list[float] | None = None
    """As in TRL's RLOOConfig: (lowest, highest) of a completion's reward, the weighted sum."""

    RANGES: ClassVar[dict[str, Rule]] = {
        "advantage_estimator": one_of(*ESTIMATORS), "scale_rewards": one_of(*SCALE_REWARDS, *TRUTHS),
        "multi_objective_aggregation": one_of(*AGGREGATIONS), "reward_weights": FINITE,
        "normalize_advantages": TRUTH, "reward_clip_range": NUMBERS,
    }

    def __post_init__(self) -> None:
        check_ranges(self)
        self.check_advantage_options()

    def check_advantage_options(self) -> None:
        """Raise ValueError for an option that the estimator does not use."""
        if self.scale_rewards in TRUTHS:
            self.scale_rewards = TRUTHS[self.scale_rewards]
        name = self.advantage_estimator
        self.check_scale(ESTIMATORS[name].scales)
        self.check_rloo()
        if self.pass_at_k is not None and name != "passk":
            raise ValueError(f"pass_at_k is {self.pass_at_k}, and advantage_estimator {name!r} does not use it; leave "
                             "it out, or set advantage_estimator='passk'")
        if self.multi_objective_aggregation == "normalize_then_sum" and name != "grpo":
            raise ValueError(
                f"multi_objective_aggregation is 'normalize_then_sum', which is an estimator by itself (GDPO); leave "
                f"advantage_estimator={name!r} out"
            )

    def check_rloo(self) -> None:
        """Raise ValueError for an option of RLOO that has no meaning with the other settings."""
        limits = self.reward_clip_range
        if self.normalize_advantages and self.advantage_estimator != "rloo":
            raise ValueError(f"normalize_advantages=True is an option of advantage_estimator='rloo', and it is "
                             f"{self.advantage_estimator!r}; use "
                             f"{'whiten_advantages' if self.advantage_estimator == GAE else 'scale_rewards'} instead")
        if limits is not None and (len(limits) != 2 or limits[0] >= limits[1]):
            raise ValueError(f"reward_clip_range is {limits}; it must be (lowest, highest)")
        if limits is not None and self.multi_objective_aggregation == "normalize_then_sum":
            raise ValueError("reward_clip_range bounds the sum of the rewards, and multi_objective_aggregation is "
                             "'normalize_then_sum', which has none; leave one of them out")

    def check_scale(self, scales: tuple[str, ...]) -> None:
        """Raise ValueError if the estimator does not use this value of `scale_rewards`."""
        if self.multi_objective_aggregation == "normalize_then_sum":
            scales = ()
        if self.scale_rewards is not None and self.scale_rewards not in scales:
            raise ValueError(
                f"scale_rewards is {self.scale_rewards!r}, which advantage_estimator {self.advantage_estimator!r} with "
                f"multi_objective_aggregation {self.multi_objective_aggregation!r} does not use; it takes "
                f"{' or '.join(scales) or 'no value: leave it out'}"
            )

    @property
    def scale(self) -> str:
        """`scale_rewards`, or the estimator's default; "none" for an estimator without scales."""
        return str(self.scale_rewards or (*ESTIMATORS[self.advantage_estimator].scales, "none")[0])


def weights_of(settings: AdvantageSettings, count: int) -> list[float]:
    """Return the weights of `count` rewards. ValueError if the settings have another number of weights."""
    weights = settings.reward_weights or [1.0] * count
    if len(weights) != count:
        raise ValueError(f"reward_weights has {len(weights)} numbers for {count} rewards: {weights}; give one for each")
    return weights


def advantages_of(rewards: Tensor, settings: AdvantageSettings, baselines: Tensor | None = None) -> Tensor:
    """Return advantages (P, G) of rewards (P, G, R). A completion without a reward is left out and gets 0."""
    if not isinstance(rewards, torch.Tensor) or rewards.ndim != 3 or not rewards.is_floating_point():
        raise ValueError(f"expected rewards (P, G, R) of a floating dtype; got {getattr(rewards, 'dtype', rewards)}, "
                         f"{tuple(getattr(rewards, 'shape', ()))}")
    weights = torch.tensor(weights_of(settings, rewards.shape[-1]), dtype=rewards.dtype)
    if settings.multi_objective_aggregation == "normalize_then_sum":  # GDPO: each reward's z-scores in the groups
        each = [of_group(rewards[..., r], "group", None, 0) for r in range(rewards.shape[-1])]
        summed = combine_rewards(torch.stack(each, -1), weights)  # the batch's mean is 0, as each group's is
        return (summed / (batch_std(summed) + STD_EPSILON)).nan_to_num(nan=0.0)
    estimator, k = ESTIMATORS[settings.advantage_estimator], settings.pass_at_k or max(rewards.shape[1] // 2, 1)
    advantages = estimator.function(summed_rewards(rewards, weights, settings), settings.scale, baselines, k)
    return (normalized(advantages) if settings.normalize_advantages else advantages).nan_to_num(nan=0.0)


def summed_rewards(rewards: Tensor, weights: Tensor, settings: AdvantageSettings) -> Tensor:
    """Return weighted sums (P, G) of rewards (P, G, R), within `reward_clip_range`."""
    sums, limits = combine_rewards(rewards, weights), settings.reward_clip_range
    return sums if limits is None else sums.clamp(*limits)


def normalized(advantages: Tensor) -> Tensor:
    """Return advantages (P, G) minus their mean, divided by their std. NaN advantages count in neither."""
    return (advantages - advantages.nanmean()) / (batch_std(advantages) + STD_EPSILON)


def assign_advantages(groups: list[RolloutGroup], names: list[str], settings: AdvantageSettings) -> None:
    """Set `reward` (the weighted sum of the named rewards) and `advantage` of every rollout, and clear
    `token_advantages`. Groups may differ in size. Rollouts that `failed`, and all rollouts of groups that are
    `unjudged` or `lost`, get reward None and advantage 0, and do not count in the advantages of other rollouts."""
    rows = [[[None if group.unjudged or group.lost or rollout.failed else rollout.rewards[name] for name in names]
             for rollout in group.rollouts] for group in groups]
    scored = [[[torch.nan if value is None else value for value in r] for r in group] for group in rows]
    widest = max(map(len, scored), default=0)
    scored = [[*group, *[[torch.nan] * len(names)] * (widest - len(group))] for group in scored]
    weights = torch.tensor(weights_of(settings, len(names)), dtype=torch.float64)
    table = without_metrics_alone(torch.tensor(scored, dtype=torch.float64), weights)  # (P, G, R)
    baselines = None
    if settings.advantage_estimator == "remax":
        missing = [torch.nan if group.baseline is None else group.baseline for group in groups]
        baselines = torch.tensor(missing, dtype=torch.float64)
    rewards, advantages = summed_rewards(table, weights, settings), advantages_of(table, settings, baselines)
    for group, sums, values in zip(groups, rewards.tolist(), advantages.tolist(), strict=True):
        for rollout, reward, advantage in zip(group.rollouts, sums, values, strict=False):
            rollout.reward = None if reward != reward else reward
            rollout.advantage = advantage
            rollout.token_advantages = None
