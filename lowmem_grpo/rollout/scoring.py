"""Scoring rollouts: rewards of every function, their weighted sum, and advantages."""

import logging
import math

import torch

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.losses.advantages import assign_advantages, combine_rewards, without_metrics_alone
from lowmem_grpo.rewards import RewardScorer, Scores
from lowmem_grpo.rewards.calling.of_groups import call
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import RolloutGroup

logger = logging.getLogger(__name__)


def score_groups(
    scorer: RewardScorer, groups: list[RolloutGroup], config: GRPOConfig, state: TrainerState,
    scores: Scores | None = None,
) -> dict[str, float]:
    """Set rewards, their weighted sum and the advantage of every rollout; returns what functions logged.

    `scores` is what the functions say, where they have been called already. A reward that is NaN or infinite is None
    and stands in `invalid_rewards`: a step does not train on such rollouts, unless its function has the weight 0 and is
    a metric alone. A group in which a required function gives None is `unjudged`.
    """
    scores = scores or call(scorer, groups, state)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for name, values in scores.rewards.items():
        for rollout, value in zip(rollouts, values, strict=True):
            rollout.rewards[name] = value
    paying = {name: scores.returned[name] for name, weight in zip(scorer.names, scorer.weights, strict=True) if weight}
    for rollout, *returned in zip(rollouts, *paying.values(), strict=True):
        given = zip(paying, returned, strict=True)
        rollout.invalid_rewards = {name: v for name, v in given if v is not None and not math.isfinite(v)}
    for name, values in scores.extras.items():
        for rollout, value in zip(rollouts, values, strict=True):
            rollout.extras[name] = value
    unjudged = mark_unjudged(scorer, groups, scores)
    assign_advantages(groups, scorer.names, config)
    for name, count in scores.invalid.items():
        if count:
            logger.warning(
                'reward %s gave NaN or infinity for %d completions: %s. For "no reward" a function returns None',
                name, count, "no step is made on their groups" if name in paying else "its weight is 0, so they count",
            )
    return scores.metrics | unjudged | {f"rewards/{name}/invalid": float(n) for name, n in scores.invalid.items()}


def mark_unjudged(scorer: RewardScorer, groups: list[RolloutGroup], scores: Scores) -> dict[str, float]:
    """Mark the groups that a required function left without an opinion; how many completions of each that were."""
    missing = {name: [value is None for value in scores.returned[name]] for name in scorer.required}
    start = 0
    for group in groups:
        end = start + len(group.rollouts)
        group.unjudged = any(any(places[start:end]) for places in missing.values())
        start = end
    return {f"rewards/{name}/unjudged": float(sum(places)) for name, places in missing.items()}


def set_baselines(
    scorer: RewardScorer, groups: list[RolloutGroup], greedy: list[RolloutGroup], state: TrainerState
) -> None:
    """Set the baseline of the groups that have none to the reward of their greedy completion (ReMax).

    `greedy` has one group of one rollout for each, in order. What functions log about these is left out: metrics and
    records are of sampled completions. A baseline stays None where no function, or a required one, has no opinion.
    """
    if not greedy:
        return
    scores = call(scorer, greedy, state)
    for name, count in scores.invalid.items():
        if count:
            logger.warning("reward %s gave NaN or infinity for %d greedy completions: no baseline of it", name, count)
    columns = [[torch.nan if value is None else value for value in scores.rewards[name]] for name in scorer.names]
    weights = torch.tensor(scorer.weights, dtype=torch.float64)
    table = without_metrics_alone(torch.tensor(columns, dtype=torch.float64).T, weights)  # (P, R)
    sums = combine_rewards(table[:, None], weights)
    waiting = [group for group in groups if group.baseline is None]
    mark_unjudged(scorer, greedy, scores)
    for group, alone, reward in zip(waiting, greedy, sums.flatten().tolist(), strict=True):
        group.baseline = None if alone.unjudged or reward != reward else reward
