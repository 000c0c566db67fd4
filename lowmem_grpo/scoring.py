"""Scoring rollouts: rewards of every function, their weighted sum, and advantages."""

import logging
import math
from typing import Any

import torch

from lowmem_grpo.advantages import assign_advantages, combine_rewards, without_metrics_alone
from lowmem_grpo.callbacks import TrainerState
from lowmem_grpo.config import GRPOConfig
from lowmem_grpo.data import is_chat
from lowmem_grpo.rewards import RewardScorer, Scores
from lowmem_grpo.types import RolloutGroup

logger = logging.getLogger(__name__)


def score_groups(
    scorer: RewardScorer, groups: list[RolloutGroup], config: GRPOConfig, state: TrainerState
) -> dict[str, float]:
    """Set rewards, their weighted sum and the advantage of every rollout; returns what functions logged.

    A reward that is NaN or infinite is None and stands in `invalid_rewards`: a step does not train on such rollouts,
    unless its function has the weight 0 and is a metric alone.
    """
    scores = call(scorer, groups, state)
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
    assign_advantages(groups, scorer.names, config)
    for name, count in scores.invalid.items():
        if count:
            logger.warning(
                'reward %s gave NaN or infinity for %d completions: %s. For "no reward" a function returns None',
                name, count, "no step is made on their groups" if name in paying else "its weight is 0, so they count",
            )
    return scores.metrics | {f"rewards/{name}/invalid": float(count) for name, count in scores.invalid.items()}


def set_baselines(
    scorer: RewardScorer, groups: list[RolloutGroup], greedy: list[RolloutGroup], state: TrainerState
) -> None:
    """Set the baseline of the groups that have none to the reward of their greedy completion (ReMax).

    `greedy` has one group of one rollout for each, in order. What functions log about these is left out: metrics and
    records are of sampled completions. A baseline stays None where no function has an opinion.
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
    for group, reward in zip(waiting, sums.flatten().tolist(), strict=True):
        group.baseline = None if reward != reward else reward


def call(scorer: RewardScorer, groups: list[RolloutGroup], state: TrainerState) -> Scores:
    """What the functions say of each rollout."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rows = [group.row for group in groups for _ in group.rollouts]
    texts, ids = [rollout.text for rollout in rollouts], [rollout.completion_ids for rollout in rollouts]
    return score_rows(scorer, rows, texts, ids, state)


def score_rows(
    scorer: RewardScorer, rows: list[dict[str, Any]], texts: list[str], ids: list[list[int]],
    state: TrainerState | None,
) -> Scores:
    """What the functions say of one completion to each row, which they get in its prompt's form: text, or a chat."""
    forms = [[{"role": "assistant", "content": text}] if is_chat(row["prompt"]) else text
             for row, text in zip(rows, texts, strict=True)]
    names = {name for row in rows for name in row} - {"prompt", "completion"}
    columns = {name: [row.get(name) for row in rows] for name in sorted(names)}
    return scorer.score([row["prompt"] for row in rows], forms, ids, columns, state)
