"""LoRA's two factors for each weight, from a saved adapter or a loaded model. A merge computes W + s B A."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.runs.adapter_file import PREFIX, rank_of, read_adapter, refuse_variants, scaling_of
from lowmem_grpo.runs.whole_files import AdapterError


@dataclass(frozen=True)
class LoraPair:
    """The change of a weight (out, in): scaling * b @ a."""

    a: Tensor  # (r, in)
    b: Tensor  # (out, r)
    scaling: float

    def rows(self, start: int, stop: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows start to stop of the product."""
        b, a = self.b[start:stop].to(device, dtype), self.a.to(device, dtype)
        return (b @ a).mul_(self.scaling)


def read_pairs(folder: Path) -> dict[str, LoraPair]:
    """The pairs of a saved adapter by the name of their module. AdapterError if it is not plain, finite LoRA."""
    config, tensors = read_adapter(folder)
    refuse_variants(config, folder, "merged")
    pairs = {}
    for module in sorted({name.partition(".lora_")[0] for name in tensors}):
        a, b = (tensors.pop(f"{module}.lora_{side}.weight", None) for side in "AB")
        if a is None or b is None or a.ndim != 2 or b.ndim != 2:
            raise AdapterError(f"the adapter in {folder} has no lora_A and lora_B matrices for {module}; only LoRA on "
                               "linear layers is merged")
        if len(a) != rank_of(config, module):
            raise AdapterError(f"the adapter in {folder} has rank {len(a)} in {module}, and adapter_config.json says "
                               f"r={rank_of(config, module)}; one file is of another adapter")
        pairs[module.removeprefix(PREFIX)] = LoraPair(a, b, scaling_of(config, module))
    if tensors:
        raise AdapterError(f"the adapter in {folder} holds {next(iter(tensors))}, which is not LoRA on a linear layer")
    return checked(pairs, str(folder))


def live_pairs(model: Any) -> dict[str, LoraPair]:
    """The pairs that a PEFT model computes with now. AdapterError if there are none, or a layer has several."""
    pairs = {}
    for path, layer in model.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        name, special = path.removeprefix(PREFIX), list(layer.lora_embedding_A) or list(layer.lora_variant)
        active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
        if layer.merged or special or len(active) > 1 or any(layer.lora_bias[adapter] for adapter in active):
            raise AdapterError(f"{name} does not have one plain LoRA adapter that is not merged yet; unmerge it "
                               "(model.unmerge_adapter()), or choose one adapter (model.set_adapter)")
        if active:
            a, b = (factor[active[0]].weight.detach() for factor in (layer.lora_A, layer.lora_B))
            pairs[name] = LoraPair(a, b, float(layer.scaling[active[0]]))
    return checked(pairs, "the model")


def checked(pairs: dict[str, LoraPair], where: str) -> dict[str, LoraPair]:
    """The same pairs. AdapterError if there are none, or one is not finite."""
    if not pairs:
        raise AdapterError(f"{where} has no LoRA layer: there is nothing to merge")
    for name, pair in pairs.items():
        if not (pair.a.isfinite().all() and pair.b.isfinite().all()):
            raise AdapterError(f"the adapter of {where} is not finite: {name} holds NaN or infinity. The run diverged; "
                               "take an older checkpoint")
    return pairs
