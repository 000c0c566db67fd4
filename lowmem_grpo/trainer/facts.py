"""What a run trains, and on what machine."""

import platform
from pathlib import Path
from typing import Any

import torch

from lowmem_grpo import __version__
from lowmem_grpo.models.fp8_linear import form_in_fp8


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
