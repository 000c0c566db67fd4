"""Scoring rollouts: rewards of every function, their weighted sum, and advantages."""

import logging

from lowmem_grpo.advantages import assign_advantages
from lowmem_grpo.callbacks import TrainerState
from lowmem_grpo.config import GRPOConfig
from lowmem_grpo.data import is_chat
from lowmem_grpo.rewards import RewardScorer, Scores
from lowmem_grpo.types import RolloutGroup

logger = logging.getLogger(__name__)


def score_groups(
    scorer: RewardScorer, groups: list[RolloutGroup], config: GRPOConfig, state: TrainerState
) -> dict[str, float]:
    """Set rewards, their weighted sum and the advantage of every rollout; returns what functions logged."""
    scores = call(scorer, groups, state)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for name, values in scores.rewards.items():
        for rollout, value in zip(rollouts, values, strict=True):
            rollout.rewards[name] = value
    for name, values in scores.extras.items():
        for rollout, value in zip(rollouts, values, strict=True):
            rollout.extras[name] = value
    assign_advantages(groups, scorer.names, config.reward_weights, str(config.scale_rewards))
    for name, count in scores.invalid.items():
        if count:
            logger.warning("reward %s gave NaN or infinity for %d completions: counted as no reward", name, count)
    return scores.metrics | {f"rewards/{name}/invalid": float(count) for name, count in scores.invalid.items()}


def call(scorer: RewardScorer, groups: list[RolloutGroup], state: TrainerState) -> Scores:
    """What the functions say of each rollout, which they get in the form of its prompt: text, or a chat."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rows = [group.row for group in groups for _ in group.rollouts]
    chats = [[{"role": "assistant", "content": r.text}] if is_chat(row["prompt"]) else r.text
             for row, r in zip(rows, rollouts, strict=True)]
    names = {name for row in rows for name in row} - {"prompt", "completion"}
    columns = {name: [row.get(name) for row in rows] for name in sorted(names)}
    ids = [rollout.completion_ids for rollout in rollouts]
    return scorer.score([row["prompt"] for row in rows], chats, ids, columns, state)
