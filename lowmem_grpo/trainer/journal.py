"""`Journal` records a step's completions, checks the alarms, and collects metrics for the log. `FirstSteps` warns about
the rewards after the first step, and tells the time left after the second, at that step's pace."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from lowmem_grpo.rewards.checking.diagnosis import about_rewards
from lowmem_grpo.runs.alarms import Alarms
from lowmem_grpo.runs.records import RunRecords, prompt_text
from lowmem_grpo.runs.state import TrainerState, mean_of
from lowmem_grpo.runs.trajectory import transcript, turn_records
from lowmem_grpo.runs.views.live import StepTimes
from lowmem_grpo.types import Rollout, RolloutGroup, warn
from lowmem_grpo.utils import time_text

logger = logging.getLogger(__name__)
PHASES = {"time/generate": "sampling", "time/reward": "rewards", "time/train": "training"}

# A log line has the last value of these metrics, and the mean of all others since the last line.
LAST = ("step", "epoch", "elapsed", "num_tokens", "policy_version", "data/skipped_rows", "memory/peak_bytes",
        "memory/reserved_bytes", "memory/kv_bytes", "memory/oom_train", "memory/oom_generate", "learning_rate",
        "nonfinite/steps")


class Journal:
    """Records the completions of every step; returns a line to log every `logging_steps` and at the last step."""

    def __init__(
        self, state: TrainerState, records: RunRecords, settings: Any, alarms: Alarms | None = None, prints: bool = True
    ) -> None:
        """`settings` are the settings of the run; `prints` is False in a process that prints nothing."""
        self.state, self.records, self.settings, self.alarms = state, records, settings, alarms
        self.show_samples = prints and getattr(settings, "log_completions", False)

    def write(self, before: int, line: dict[str, Any], groups: list[RolloutGroup]) -> dict[str, Any] | None:
        """Record one step's line, and the completions of `groups`; return the line to log, if one is due."""
        if self.alarms is not None:
            line |= self.alarms.watch(line)
        if groups:
            self.records.completions(self.state.global_step, groups)
        self.state.unlogged.append(line)
        step, every = self.state.global_step, self.settings.logging_steps
        first = self.settings.logging_first_step and before == 0
        if step // every == before // every and step != self.state.max_steps and not first:
            return None
        logged = self.flush()
        if self.show_samples and groups:
            for group, rollout in chosen(groups, self.settings.num_completions_to_print,
                                         self.settings.log_unique_prompts):
                self.show_sample(group, rollout)
        return logged

    def flush(self) -> dict[str, Any] | None:
        """Return the log line for the steps since the last one; None if there are none."""
        if not self.state.unlogged:
            return None
        last = self.state.unlogged[-1]
        logged = mean_of(self.state.unlogged) | {name: last[name] for name in LAST if name in last}
        self.state.unlogged = []
        return logged

    def show_sample(self, group: RolloutGroup, rollout: Rollout) -> None:
        what, ended = ("episode", f", ended by {rollout.ending}") if rollout.ending else ("completion", "")
        logger.warning("step %d\n%s\n--- %s, reward %s%s\n%s", self.state.global_step,
                       prompt_text(rollout.opening or group.row.get("prompt")), what, rollout.reward, ended,
                       transcript(turn_records(rollout)) if rollout.turns else rollout.text)


def chosen(groups: list[RolloutGroup], count: int | None, unique: bool) -> list[tuple[RolloutGroup, Rollout]]:
    """Return completions to print: with `unique` each prompt's best, of at most `count` prompts; else the first
    `count`, or the best of the first prompt if `count` is None."""
    if count is not None and not unique:
        return [(group, rollout) for group in groups for rollout in group.rollouts][:count]
    return [(group, max(group.rollouts, key=lambda rollout: -math.inf if rollout.reward is None else rollout.reward))
            for group in groups[: count or (None if unique else 1)]]


class FirstSteps:
    """A callback, with the methods of transformers' TrainerCallback, that reports on the first two steps."""

    def __init__(
        self, records: RunRecords, say: Callable[[str], None] | None = None, rewards: Mapping[str, float] | None = None
    ) -> None:
        """`rewards` are the weights of a run's rewards by name; `say` prints a line, or is None to print nothing."""
        self.records, self.say, self.rewards = records, say, rewards
        self.step_times = StepTimes()
        self.seen = 0  # updates since `train` was called

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen = 0
        self.step_times.start_at(state.global_step)

    def on_step_end(
        self, args: Any, state: Any, control: Any, groups: list[RolloutGroup] | None = None, **kwargs: Any
    ) -> None:
        """`groups` are the scored groups of this step."""
        self.seen += 1
        self.step_times.mark(state.global_step)
        if self.seen == 1 and groups and self.rewards and args.preflight:
            warn(logger, "first step", about_rewards(groups, self.rewards))
        if self.seen == 2:
            left = self.step_times.left(state.max_steps) or 0.0
            self.records.summary({"expected_seconds": state.elapsed + left})
            if left and self.say is not None and args.preflight:
                self.say(self.expectation(args, state, left))

    def expectation(self, args: Any, state: TrainerState, left: float) -> str:
        """Return the line for the second step: the pace (without the first step, which warms up) and the time left."""
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
