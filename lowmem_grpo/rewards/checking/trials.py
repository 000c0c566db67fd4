"""Tries reward functions one by one, so that the failure of one does not hide what the others do."""

import time
from dataclasses import replace

from lowmem_grpo.rewards.calling.contract import RewardError, own_limit, unwrap
from lowmem_grpo.rewards.calling.of_groups import call
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rewards.checking.result import Trial
from lowmem_grpo.rewards.verifier import VerifiedReward
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import RolloutGroup


def try_all(scorer: RewardScorer, groups: list[RolloutGroup], state: TrainerState, limit: float) -> list[Trial]:
    """A trial of each function of the scorer on all rollouts. Each may take `limit` seconds."""
    found = []
    for name, func, weight in zip(scorer.names, scorer.funcs, scorer.weights, strict=True):
        kind = "verifier" if isinstance(unwrap(func), VerifiedReward) else "reward"
        alone = RewardScorer(func, None, limit, episodes=scorer.episodes)
        found.append(try_one(Trial(name, kind, weight), alone, groups, state))
    return found


def try_one(trial: Trial, scorer: RewardScorer, groups: list[RolloutGroup], state: TrainerState) -> Trial:
    """Fill in what the scorer's only function pays for the rollouts, and for an empty completion of each prompt."""
    func = scorer.funcs[0]
    scorer.names = [trial.name]
    scorer.said.add(trial.name)  # conversions become findings here
    started = time.monotonic()
    try:
        scores = call(scorer, groups, state)
    except RewardError as error:
        trial.error = error
        return trial
    finally:
        trial.seconds = time.monotonic() - started
    trial.pays, trial.invalid = scores.rewards[trial.name], scores.invalid[trial.name]
    trial.converted = scores.converted.get(trial.name, [])
    trial.own_limit, trial.trouble = own_limit(func), getattr(unwrap(func), "trouble", None)
    trial.verdicts = scores.metrics.get(f"verdicts/{getattr(func, '__name__', trial.name)}")
    try:
        trial.empty = call(scorer, [without_text(group) for group in groups], state).rewards[trial.name]
    except RewardError as error:
        trial.empty_error = error
    return trial


def without_text(group: RolloutGroup) -> RolloutGroup:
    """The group with a single rollout, which ended at once and is empty."""
    rollout = replace(group.rollouts[0], completion_ids=[], rollout_logprobs=[], text="", turns=[], rewards={},
                      extras={})
    return replace(group, rollouts=[rollout])
