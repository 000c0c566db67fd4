"""What the first steps of a run show: what the rewards paid in the first one, and how long the run will take."""

import logging
import math
from collections.abc import Callable
from typing import Any

from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rewards.checking.diagnosis import (
    about_length,
    about_signal,
    differs,
    findings_of,
    silent,
    unlike_numbers,
)
from lowmem_grpo.rewards.checking.result import Trial
from lowmem_grpo.runs.findings import Finding, by_severity
from lowmem_grpo.runs.records import RunRecords
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import Rollout, RolloutGroup
from lowmem_grpo.units import time_text
from lowmem_grpo.views.live import StepTimes

logger = logging.getLogger(__name__)

ENOUGH_GROUPS = 4  # with fewer groups, little can be said about each function and about the share with signal
PHASES = {"time/generate": "sampling", "time/reward": "rewards", "time/train": "training"}


class FirstSteps:
    """Listens to a run with the methods of transformers' TrainerCallback."""

    def __init__(
        self, records: RunRecords, say: Callable[[str], None] | None = None, scorer: RewardScorer | None = None
    ) -> None:
        """`scorer` is None in a run without rewards; `say` prints a line, and is None where none is wanted."""
        self.records, self.say, self.scorer = records, say, scorer
        self.step_times = StepTimes()
        self.seen = 0  # updates since `train` was called

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen = 0
        self.step_times.begin(state.global_step)

    def on_step_end(
        self, args: Any, state: Any, control: Any, groups: list[RolloutGroup] | None = None, **kwargs: Any
    ) -> None:
        """`groups` are those of this step, with rewards."""
        self.seen += 1
        self.step_times.mark(state.global_step)
        if self.seen == 1 and groups and self.scorer is not None and args.preflight:
            for finding in about_rewards(groups, self.scorer):
                if finding.severity != "note":
                    logger.warning("first step: %s", finding)
        if self.seen == 2:
            self.expect(args, state)

    def expect(self, args: Any, state: TrainerState) -> None:
        """Record how long the whole run will take, and print it unless the run is over."""
        left = self.step_times.left(state.max_steps) or 0.0
        self.records.summary({"expected_seconds": state.elapsed + left})
        if left and self.say is not None and args.preflight:
            self.say(self.expectation(args, state, left))

    def expectation(self, args: Any, state: TrainerState, left: float) -> str:
        """One line after the second step; the first step warms up."""
        each = self.step_times.per_step or 0.0
        last = (state.unlogged or state.log_history or [{}])[-1]
        shares = ", ".join(f"{name} {last[key]:.0%}" for key, name in PHASES.items() if key in last)
        every = args.save_steps if getattr(args, "save_strategy", "no") == "steps" else None
        line = (f"{time_text(each)} a step{shares and f' ({shares})'}: {time_text(round(left))} to go until step "
                f"{state.max_steps}")
        if every is None:
            return line
        due = min((state.global_step // every + 1) * every, state.max_steps)
        until_due = round(each * (due - state.global_step))
        return f"{line}; the next checkpoint is due at step {due}, in {time_text(until_due)}"


def about_rewards(groups: list[RolloutGroup], scorer: RewardScorer) -> list[Finding]:
    """Findings about what the functions paid for the completions of a step, as in `rewards.check`.

    With fewer than ENOUGH_GROUPS groups, only three things are reported: no group has signal, values are not numbers,
    and no function paid anything. If no group has signal, functions that pay the same for all are not listed singly.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    trials = [trial_of(name, weight, rollouts) for name, weight in zip(scorer.names, scorer.weights, strict=True)]
    paying = [trial for trial in trials if trial.weight]
    with_signal = sum(differs([rollout.reward for rollout in group.rollouts]) for group in groups)
    cut = sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts)
    enough = len(groups) >= ENOUGH_GROUPS
    found = about_length(cut)
    if enough and with_signal:
        found += findings_of(paying, len(groups[0].rollouts), [], math.inf, math.inf, len(rollouts))
    else:
        mute = paying if enough or not any(trial.paid for trial in paying) else []
        found += [finding for trial in mute for finding in silent(trial)]
        found += [finding for trial in paying for finding in unlike_numbers(trial)]
    if enough or not with_signal:
        found += about_signal(with_signal / len(groups), with_signal, len(groups), 0)
    return by_severity(found)


def trial_of(name: str, weight: float, rollouts: list[Rollout]) -> Trial:
    """What one function paid for each completion."""
    invalid = sum(name in rollout.invalid_rewards for rollout in rollouts)
    return Trial(name, "reward", weight, [rollout.rewards.get(name) for rollout in rollouts], invalid=invalid)
