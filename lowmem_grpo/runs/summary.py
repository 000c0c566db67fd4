"""What a run trains and on what machine, and where it ended, under the names that transformers gives its figures."""

import math
import platform
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from lowmem_grpo import __version__
from lowmem_grpo.models.fp8_linear import form_in_fp8
from lowmem_grpo.runs.state import TrainerState


def facts(model: Any, device: torch.device) -> dict[str, Any]:
    """Return a PEFT model's numbers of parameters, the card (or the processor), its bytes, and the versions."""
    trainable, whole = model.get_nb_trainable_parameters()  # peft counts a packed 4-bit weight as what it stands for
    on_card, base = device.type == "cuda", model.get_base_model()
    dtype = str(base.get_input_embeddings().weight.dtype).removeprefix("torch.")
    return {"parameters": whole - trainable, "trainable_parameters": trainable,
            "weights": "4-bit" if getattr(base, "is_loaded_in_4bit", False) else "FP8" if form_in_fp8(base) else dtype,
            "card": torch.cuda.get_device_name(device) if on_card else None,
            "card_bytes": torch.cuda.get_device_properties(device).total_memory if on_card else None,
            "processor": cpu_model(), "version": __version__, "torch": torch.__version__}


def cpu_model() -> str:
    """Return the processor's name, as Linux gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


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
