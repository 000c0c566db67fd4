"""The tensors of a saved LoRA adapter, and whether they are whole, finite and made for the model that loads them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lowmem_grpo.runs.checkpoint import ADAPTER_FILE, check_adapter_folder

PREFIX = "base_model.model."  # PEFT puts this before the names of a model's modules
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIDES = {"A": "lora_A.weight", "B": "lora_B.weight", "magnitude": "lora_magnitude_vector"}


class AdapterError(ValueError):
    """A saved adapter cannot be used; the message says why, and what to do."""


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(PEFT's settings, the tensors) of a saved adapter. AdapterError unless every tensor is finite floating point."""
    check_adapter_folder(folder)
    try:
        config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        tensors = load_file(folder / ADAPTER_FILE)
    except (ValueError, SafetensorError) as error:
        raise AdapterError(f"the adapter in {folder} cannot be read: {error}; use an older checkpoint") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{folder / 'adapter_config.json'} holds no settings; use an older checkpoint")
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype not in DTYPES:
            raise AdapterError(f"the adapter in {folder} holds {name} as {str(tensor.dtype).removeprefix('torch.')}; "
                               "allowed are float32, bfloat16 and float16: save it again without quantizing it")
        if not tensor.isfinite().all():
            raise AdapterError(f"the adapter in {folder} is not finite: {name} holds NaN or infinity. The run "
                               "diverged; take an older checkpoint")
    return config, tensors


def layers_of(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of each layer by what follows its name, as `lora_A.weight`."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.partition(".lora_")
        found.setdefault(layer, {})[f"lora_{part}"] = tensor
    return found


def check_for(model: nn.Module, folder: Path) -> None:
    """AdapterError unless the adapter in `folder` is whole LoRA that fits the layers with LoRA in `model`."""
    config, tensors = read_adapter(folder)
    saved = layers_of(tensors)
    held = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    if missing := sorted(saved.keys() - held.keys()):
        raise AdapterError(
            f"the adapter in {folder} has {len(missing)} layers that the one in the model lacks, {missing[0]} among "
            "them; load the model again and put LoRA on the same target_modules"
        )
    if missing := sorted(wanted_by(config, folder, held) - saved.keys()):
        raise AdapterError(
            f"the adapter in {folder} lacks {len(missing)} of the layers that its own adapter_config.json names, "
            f"{missing[0]} among them; the file is not whole: use an older checkpoint"
        )
    for name, parts in sorted(saved.items()):
        for problem in problems(parts, held[name], config):
            raise AdapterError(f"the adapter in {folder} does not fit: {name} {problem}")


def wanted_by(config: dict[str, Any], folder: Path, held: dict[str, nn.Module]) -> set[str]:
    """The model's layers that the adapter's settings name."""
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"the adapter in {folder} is of type {config.get('peft_type')}; only LoRA can be loaded")
    try:
        settings = PeftConfig.from_pretrained(str(folder))
    except (TypeError, ValueError, KeyError) as error:
        raise AdapterError(f"{folder / 'adapter_config.json'} holds no settings of PEFT: {error}") from error
    return {name for name in held if check_target_module_exists(settings, name.removeprefix(PREFIX))}


def problems(parts: dict[str, Tensor], layer: Any, config: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the tensors of a layer."""
    a, b, magnitude = (parts.get(name) for name in SIDES.values())
    if a is None or b is None:
        yield f"has no {SIDES['A' if a is None else 'B']}; the file is not whole: use an older checkpoint"
        return
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        yield f"has factors of shapes {list(a.shape)} and {list(b.shape)}, which cannot be multiplied"
    elif (a.shape[1], len(b)) != (layer.in_features, layer.out_features):
        yield (f"takes {a.shape[1]} numbers and gives {len(b)}, where this model's layer takes {layer.in_features} and "
               f"gives {layer.out_features}: it was trained on another base model")
    elif not config.get("rank_pattern") and len(a) != config.get("r"):
        yield f"has rank {len(a)} and adapter_config.json says r={config.get('r')}; one file is of another adapter"
    if config.get("use_dora") and magnitude is None:
        yield ("has no lora_magnitude_vector although adapter_config.json says use_dora: without its magnitudes DoRA "
               "is another model; save the adapter again with PEFT's save_pretrained")
    if magnitude is not None and magnitude.numel() != layer.out_features:
        yield f"has {magnitude.numel()} magnitudes and {layer.out_features} outputs"
