"""`Journal`: records a step's completions, checks the alarms, and collects metrics for the log."""

import logging
from typing import Any

from lowmem_grpo.runs.alarms import Alarms
from lowmem_grpo.runs.records import RunRecords, prompt_text
from lowmem_grpo.runs.state import TrainerState, mean_of
from lowmem_grpo.runs.trajectory import transcript, turn_records
from lowmem_grpo.types import Rollout, RolloutGroup

logger = logging.getLogger(__name__)

# A log line has the last value of these metrics, and the mean of all others since the last line.
LAST = ("step", "epoch", "elapsed", "num_tokens", "policy_version", "data/skipped_rows", "memory/peak_bytes",
        "memory/reserved_bytes", "memory/kv_bytes", "memory/oom_train", "memory/oom_generate", "learning_rate",
        "nonfinite/steps")


class Journal:
    """The journal of a run: one line to log every `logging_steps` and at the last step; completions at each step."""

    def __init__(
        self, state: TrainerState, records: RunRecords, settings: Any, alarms: Alarms | None = None, prints: bool = True
    ) -> None:
        """`settings` are the run's; `prints` is False in a process without output."""
        self.state, self.records, self.settings, self.alarms = state, records, settings, alarms
        self.show_samples = prints and getattr(settings, "log_completions", False)

    def write(self, before: int, line: dict[str, Any], groups: list[RolloutGroup]) -> dict[str, Any] | None:
        """Record one step's line, and the completions of `groups`; return the line to log, if one is due.
        """
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
    """Return completions to print: the first `count`; if `unique`, each prompt's best; else the first prompt's best."""
    each = [(group, best_of(group)) for group in groups] if unique or count is None else [
        (group, rollout) for group in groups for rollout in group.rollouts]
    return each[: count or (None if unique else 1)]


def best_of(group: RolloutGroup) -> Rollout:
    """Return the rollout with the highest reward."""
    return max(group.rollouts, key=lambda rollout: rollout.reward if rollout.reward is not None else -float("inf"))
