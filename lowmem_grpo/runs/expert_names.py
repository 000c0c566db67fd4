"""The names of LoRA on experts, in a model here and in PEFT's files.

PEFT adapts the stacked weights of all experts by `target_parameters`: it wraps their module once for each stack, in the
order of KINDS. So a file has `experts.base_layer.lora_A` for the stack that was wrapped first and `experts.lora_A` for
the last. Here each stack is a module, with `experts.gate_up_proj.lora_A`. The factors of E experts are the same: A
(E r, in), with expert e in rows e r to (e + 1) r, and B (out, r E), with expert e in each E-th column, from e on.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from lowmem_grpo.runs.saved_adapter import ADAPTER_FILE, AdapterError, adapter_settings

KINDS = ("gate_up_proj", "down_proj")  # in the order in which transformers' module of experts has them
IN_MODEL = re.compile(rf"(.*\.experts)\.({'|'.join(KINDS)})(?=$|\.lora_)")
IN_FILE = re.compile(r"(.*\.experts)(\.base_layer)?(?=\.lora_)")
NUMBERED = re.compile(r".*\.\d+\.")  # the path before a layer's own modules
OF_LAYERS = ("layers_to_transform", "layers_pattern", "exclude_modules")  # PEFT applies them to modules only


def is_stack(layer: str) -> bool:
    """Return whether a layer's name is that of a stack of experts."""
    return IN_MODEL.fullmatch(layer) is not None


def names_in_file(names: Iterable[str]) -> dict[str, str]:
    """Return {name in the model: name in PEFT's file} for parameters of an adapter."""
    found = {name: IN_MODEL.match(name) for name in names}
    outer = {match[1] for match in found.values() if match and match[2] == KINDS[1]}
    return {name: name if match is None else "".join((
        match[1], ".base_layer" if match[2] == KINDS[0] and match[1] in outer else "", name[match.end():]))
        for name, match in found.items()}


def named_in_model(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    """Return the tensors of PEFT's file under their names in the model. AdapterError for LoRA on experts that
    `target_parameters` in the settings do not name."""
    targets = expert_targets(settings)

    def own(name: str) -> str:
        match = IN_FILE.match(name)
        if match is None:
            return name
        kinds = [kind for kind in KINDS if hits(targets, f"{match[1]}.{kind}")]
        if len(kinds) <= bool(match[2]):
            raise AdapterError(f"the adapter in {folder} holds {name}, and target_parameters in its "
                               f"adapter_config.json name {len(kinds)} stacks of these experts; one file is of another "
                               "adapter")
        return f"{match[1]}.{kinds[0 if match[2] else -1]}{name[match.end():]}"

    return {own(name): tensor for name, tensor in tensors.items()}


def expert_targets(settings: Mapping[str, Any]) -> list[str]:
    """Return the `target_parameters` of an adapter's settings if all are stacks of experts; else none."""
    targets = settings.get("target_parameters") or []
    good = isinstance(targets, list | tuple | set) and all(
        isinstance(target, str) and target.rpartition(".")[2] in KINDS for target in targets)
    return sorted(targets) if good else []


def hits(targets: Collection[str], path: str) -> bool:
    """Return whether one of PEFT's targets is this path, or its last parts."""
    return any(f".{path}".endswith(f".{target}") for target in targets)


def settings_in_model(settings: dict[str, Any], layers: Collection[str]) -> dict[str, Any]:
    """Return a file's settings with the stacks of experts among `target_modules`. `layers` are all with LoRA: they are
    listed where other settings choose modules in a way that PEFT does not apply to parameters."""
    if not (stacks := expert_targets(settings)):
        return settings
    modules: Any = settings.get("target_modules") or []
    listed = isinstance(modules, str) or any(settings.get(name) is not None for name in OF_LAYERS)
    if listed:
        settings = settings | dict.fromkeys(OF_LAYERS)
    return settings | {"target_modules": sorted(layers) if listed else [*modules, *stacks], "target_parameters": None}


def settings_in_file(settings: dict[str, Any], layers: Collection[str], stacks: Collection[str]) -> dict[str, Any]:
    """Return a model's settings with stacks of experts among `target_parameters`, as PEFT takes them. `layers` are all
    with LoRA, and `stacks` all of the model."""
    others = sorted(layer for layer in layers if not is_stack(layer))
    if len(others) == len(layers):
        return settings
    modules: Any = settings.get("target_modules") or []
    modules = others if isinstance(modules, str) else [name for name in modules if any(
        hits([name], layer) for layer in others)]
    parameters: list[str] = []
    for kind in KINDS:
        mine, held = (sorted(layer for layer in of if layer.endswith(f".experts.{kind}")) for of in (layers, stacks))
        parameters += [NUMBERED.sub("", mine[0])] if mine and mine == held else mine
    return settings | {"target_modules": modules, "target_parameters": parameters}


def rename_in_file(folder: Path, layers: Collection[str], stacks: Collection[str]) -> None:
    """Rewrite an adapter that PEFT saved under the model's names as it saves one on transformers' own model."""
    settings, file = settings_in_file(adapter_settings(folder), layers, stacks), folder / ADAPTER_FILE
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True), "utf-8")
    tensors = load_file(file)  # which stays mapped
    save_file({name: tensors[own] for own, name in names_in_file(tensors).items()}, new := file.with_suffix(".new"),
              {"format": "pt"})
    new.replace(file)
