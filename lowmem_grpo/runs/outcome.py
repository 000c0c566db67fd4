"""What `train` returns: where the run ended, and its figures under the names that transformers gives them."""

from dataclasses import dataclass
from typing import Any

from lowmem_grpo.runs.state import TrainerState


@dataclass(frozen=True)
class TrainOutput:
    """What `train` returns."""

    global_step: int
    metrics: dict[str, Any]
    """The last line of the log, and train_runtime (seconds of this call), train_samples_per_second,
    train_steps_per_second and train_loss."""
    finished: bool

    @property
    def training_loss(self) -> float:
        """The mean of the logged losses; 0.0 where nothing was logged."""
        return float(self.metrics["train_loss"])


def outcome(state: TrainerState, finished: bool, began: int, seconds: float, samples: int) -> TrainOutput:
    """Of a run that began at step `began`, and took so many seconds for `samples` rows or completions a step."""
    made = state.global_step - began
    losses = [line["loss"] for line in state.log_history if line.get("loss") is not None and line["step"] > began]
    per_second = made / seconds if seconds else 0.0
    return TrainOutput(state.global_step, {
        **(state.log_history or [{}])[-1], "train_runtime": seconds, "train_steps_per_second": per_second,
        "train_samples_per_second": per_second * samples, "train_loss": sum(losses) / len(losses) if losses else 0.0,
    }, finished)
