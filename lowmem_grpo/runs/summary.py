"""Where a run ended, under the names that transformers gives its figures."""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lowmem_grpo.runs.state import TrainerState


def error_text(error: BaseException) -> str:
    """Return an error's kind and message, with the notes that say what to do."""
    return "\n".join([f"{type(error).__name__}: {error}".rstrip(": "), *getattr(error, "__notes__", [])])


OF_STEPS = ("loss", "grad_norm", "learning_rate")  # in a line of the log, and not in the summary


@dataclass(frozen=True)
class TrainOutput:
    """The result of `train`."""

    global_step: int
    metrics: dict[str, Any]  # the last line of the log: `summary`
    finished: bool

    @property
    def training_loss(self) -> float:
        """The mean loss of this call's steps; 0.0 where it made none."""
        return float(self.metrics["train_loss"])


def summary(state: TrainerState, losses: list[float], samples: int, seconds: float, parameters: int) -> dict[str, Any]:
    """Return the last line of a run's log: transformers' figures, and what the last step's line measured. `losses` are
    those of the steps that this call of `train` made, on so many `samples`. As in transformers, total_flos is 6 for
    each token and each of the `parameters` that are no embedding, over all calls."""
    state.total_flos = 6.0 * state.num_tokens * parameters
    last: dict[str, Any] = next((line for line in reversed(state.log_history) if losses and "loss" in line), {})
    known = [loss for loss in losses if math.isfinite(loss)]
    return {**{name: value for name, value in last.items() if name.partition("/")[0] not in OF_STEPS},
            **speed("train", seconds, samples, len(losses)), "total_flos": state.total_flos,
            "train_loss": fmean(known) if known else 0.0, "step": state.global_step, "epoch": state.epoch}


def speed(prefix: str, seconds: float, samples: int, steps: int) -> dict[str, float]:
    """Return how long something took, and its samples and steps a second, under transformers' names."""
    rates = {"samples": samples / seconds, "steps": steps / seconds} if seconds else {}
    return {f"{prefix}_runtime": seconds, **{f"{prefix}_{name}_per_second": rate for name, rate in rates.items()}}
