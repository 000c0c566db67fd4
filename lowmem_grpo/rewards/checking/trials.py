"""Tries reward functions one by one, so that the failure of one does not hide what the others do."""

import time
from dataclasses import dataclass, field, replace

from lowmem_grpo.rewards.calling.contract import RewardError, RewardFunction, own_limit, unwrap
from lowmem_grpo.rewards.calling.of_groups import call
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rewards.verifier import VerifiedReward
from lowmem_grpo.runs.findings import Finding
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import RolloutGroup


@dataclass
class RewardTrial:
    """One reward function on N sampled completions, and on an empty completion of each prompt."""

    name: str
    kind: str  # "verifier": it pays for a verdict; "reward": it computes the number itself
    weight: float
    pays: list[float | None] = field(default_factory=list)  # (N,); empty where it failed
    empty: list[float | None] = field(default_factory=list)  # one per prompt
    invalid: int = 0  # NaN and infinite values among `pays`, where they are None
    converted: list[str] = field(default_factory=list)  # types other than numbers that it returned
    verdicts: float | None = None  # the share of right verdicts, of a verifier
    seconds: float = 0.0  # for the N completions
    error: Exception | None = None  # why it failed on the samples
    empty_error: Exception | None = None  # why it failed on empty completions only
    own_limit: float | None = None  # its own time limit in seconds, whatever the run allows
    trouble: Finding | None = None  # why it paid None when it could not judge

    @property
    def paid(self) -> list[float]:
        return [pay for pay in self.pays if pay is not None]


def try_all(scorer: RewardScorer, groups: list[RolloutGroup], state: TrainerState) -> list[RewardTrial]:
    """Return a trial of each function of the scorer on all rollouts. Each may take the scorer's `timeout`."""
    functions = zip(scorer.names, scorer.funcs, scorer.weights, strict=True)
    return [try_function(name, func, weight, scorer.timeout, groups, state) for name, func, weight in functions]


def try_function(
    name: str, func: RewardFunction, weight: float, limit: float, groups: list[RolloutGroup], state: TrainerState
) -> RewardTrial:
    """Return what a function pays for the rollouts, and for an empty completion of each prompt."""
    trial = RewardTrial(name, "verifier" if isinstance(unwrap(func), VerifiedReward) else "reward", weight)
    scorer = RewardScorer(func, None, limit)
    scorer.names = [name]
    scorer.said.add(name)  # conversions become findings here
    started = time.monotonic()
    try:
        scores = call(scorer, groups, state)
    except RewardError as error:
        trial.error = error
        return trial
    finally:
        trial.seconds = time.monotonic() - started
    trial.pays, trial.invalid = scores.rewards[name], scores.invalid[name]
    trial.converted = scores.converted.get(name, [])
    trial.own_limit, trial.trouble = own_limit(func), getattr(unwrap(func), "trouble", None)
    trial.verdicts = scores.metrics.get(f"verdicts/{getattr(func, '__name__', name)}")
    try:
        trial.empty = call(scorer, [without_text(group) for group in groups], state).rewards[name]
    except RewardError as error:
        trial.empty_error = error
    return trial


def without_text(group: RolloutGroup) -> RolloutGroup:
    rollout = replace(group.rollouts[0], completion_ids=[], rollout_logprobs=[], text="", turns=[], rewards={},
                      extras={})
    return replace(group, rollouts=[rollout])
