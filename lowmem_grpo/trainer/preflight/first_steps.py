"""What the first steps of a run show: what the rewards paid in the first one, and how long the run will take."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from lowmem_grpo.rewards.checking.diagnosis import about_rewards
from lowmem_grpo.runs.findings import warn
from lowmem_grpo.runs.records import RunRecords
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.runs.views.live import StepTimes
from lowmem_grpo.types import RolloutGroup
from lowmem_grpo.utils import time_text

logger = logging.getLogger(__name__)
PHASES = {"time/generate": "sampling", "time/reward": "rewards", "time/train": "training"}


class FirstSteps:
    """Listens to a run with the methods of transformers' TrainerCallback."""

    def __init__(
        self, records: RunRecords, say: Callable[[str], None] | None = None, rewards: Mapping[str, float] | None = None
    ) -> None:
        """`rewards` are the weights of a run's rewards by name; `say` prints a line, and is None where none is wanted.
        """
        self.records, self.say, self.rewards = records, say, rewards
        self.step_times = StepTimes()
        self.seen = 0  # updates since `train` was called

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen = 0
        self.step_times.start_at(state.global_step)

    def on_step_end(
        self, args: Any, state: Any, control: Any, groups: list[RolloutGroup] | None = None, **kwargs: Any
    ) -> None:
        """`groups` are those of this step, with rewards."""
        self.seen += 1
        self.step_times.mark(state.global_step)
        if self.seen == 1 and groups and self.rewards and args.preflight:
            warn(logger, "first step", about_rewards(groups, self.rewards))
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
