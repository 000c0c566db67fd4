"""What a run writes down after each step, and its alarms."""

import logging
from typing import Any

from lowmem_grpo.runs.alarms import Alarms
from lowmem_grpo.runs.clock import mean_of
from lowmem_grpo.runs.records import RunRecords, prompt_text
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.runs.trajectory import transcript, turn_records
from lowmem_grpo.types import RolloutGroup

logger = logging.getLogger(__name__)

# A log line holds the last value of these, and of everything else the mean over the steps since the last line.
LAST = ("step", "epoch", "elapsed", "num_tokens", "policy_version", "data/skipped_rows", "memory/peak_bytes",
        "memory/reserved_bytes", "memory/kv_bytes", "memory/oom_train", "memory/oom_generate", "learning_rate",
        "nonfinite/steps")


class Journal:
    """Collects step lines and writes one every `logging_steps`, and at the last step; completions are written at every
    step."""

    def __init__(
        self, state: TrainerState, records: RunRecords, logging_steps: int, alarms: Alarms | None = None,
        show_samples: bool = False,
    ) -> None:
        """`show_samples` prints one completion with each line."""
        self.state, self.records, self.every = state, records, logging_steps
        self.alarms, self.show_samples = alarms, show_samples

    def write(self, before: int, line: dict[str, Any], groups: list[RolloutGroup]) -> dict[str, Any] | None:
        """Take one step's line; returns the logged line, or None if none is due yet. `before` is the step before.

        `groups` are those whose completions are recorded.
        """
        if self.alarms is not None:
            line |= self.alarms.watch(line)
        if groups:
            self.records.completions(self.state.global_step, groups)
        self.state.unlogged.append(line)
        step = self.state.global_step
        if step // self.every == before // self.every and step != self.state.max_steps:
            return None
        logged = self.flush()
        if self.show_samples and groups:
            self.show_sample(groups[0])
        return logged

    def flush(self) -> dict[str, Any] | None:
        """Write a line of the steps since the last one; None where there are none."""
        if not self.state.unlogged:
            return None
        last = self.state.unlogged[-1]
        logged = mean_of(self.state.unlogged) | {name: last[name] for name in LAST if name in last}
        self.state.unlogged = []
        self.records.metrics(logged)
        self.state.log_history.append(logged)
        return logged

    def show_sample(self, group: RolloutGroup) -> None:
        """One prompt and its best completion, for `log_completions`."""
        best = max(group.rollouts, key=lambda rollout: rollout.reward if rollout.reward is not None else -float("inf"))
        what, ended = ("episode", f", ended by {best.ending}") if best.ending else ("completion", "")
        logger.warning(
            "step %d\n%s\n--- %s, reward %s%s\n%s", self.state.global_step,
            prompt_text(best.opening or group.row.get("prompt")), what, best.reward, ended,
            transcript(turn_records(best)) if best.turns else best.text,
        )
