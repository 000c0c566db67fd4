"""What a run trains and on what machine, and where it ended, under the names that transformers gives its figures."""

import platform
from dataclasses import dataclass
from pathlib import Path
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
    return {
        "parameters": whole - trainable, "trainable_parameters": trainable,
        "weights": "4-bit" if getattr(base, "is_loaded_in_4bit", False) else "FP8" if form_in_fp8(base) else dtype,
        "card": torch.cuda.get_device_name(device) if on_card else None,
        "card_bytes": torch.cuda.get_device_properties(device).total_memory if on_card else None,
        "processor": cpu_model(), "version": __version__, "torch": torch.__version__,
    }


def cpu_model() -> str:
    """Return the processor's name, as Linux gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def error_text(error: BaseException) -> str:
    """Return an error's kind and message, with the notes that say what to do."""
    lines = [f"{type(error).__name__}: {error}".rstrip(": "), *getattr(error, "__notes__", [])]
    return "\n".join(lines)


@dataclass(frozen=True)
class TrainOutput:
    """The result of `train`."""

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
    """Return the outcome of a run that began at step `began`; `samples` are its rows or completions a step."""
    made = state.global_step - began
    losses = [line["loss"] for line in state.log_history if line.get("loss") is not None and line["step"] > began]
    per_second = made / seconds if seconds else 0.0
    return TrainOutput(state.global_step, {
        **(state.log_history or [{}])[-1], "train_runtime": seconds, "train_steps_per_second": per_second,
        "train_samples_per_second": per_second * samples, "train_loss": sum(losses) / len(losses) if losses else 0.0,
    }, finished)
