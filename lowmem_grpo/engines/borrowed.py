"""The trainer's modules as another engine computes with them: the same tensors, read anew in every call.

An engine's layer may stand for several modules of the trainer side by side (qkv_proj for q_proj, k_proj, v_proj). Its
output is the concatenation of theirs, LoRA and biases included. Everything goes through one opaque op, so that an
engine's compiler and CUDA graphs pass over it; the op finds its layer by name.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_grpo.kernels.lora import FrozenWeight, LoRA, forward_linears, frozen_weight

LAYERS: dict[str, "BorrowedLinear"] = {}  # what the op finds by name, while an engine lives


class BorrowError(ValueError):
    """The trainer's model and the engine's do not map onto each other, or no longer do."""


@dataclass
class BorrowedLinear:
    """Linear modules of the trainer (plain or 4-bit, with or without LoRA of peft) on one input."""

    name: str  # the engine's name of the layer
    modules: list[nn.Module]
    switch: Tensor  # () 1 with the adapter, 0 for the base model; on the device, so that graphs need no change
    weights: list[FrozenWeight] = field(init=False)
    addresses: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = [frozen_weight(base_of(module).weight) for module in self.modules]
        self.addresses = [tensor.data_ptr() for tensor in self.tensors()]
        LAYERS[self.name] = self

    @property
    def out_features(self) -> int:
        return sum(weight.shape[0] for weight in self.weights)

    def tensors(self) -> list[Tensor]:
        """Every tensor that is borrowed: weights, biases and the adapters that are in use."""
        bases = [base_of(module) for module in self.modules]
        found = [tensor for base in bases for tensor in (base.weight, base.bias) if tensor is not None]
        loras = [lora_of(module) for module in self.modules]
        return found + [tensor for lora in loras if lora is not None for tensor in (lora.a, lora.b)]

    def check(self) -> None:
        """Raise BorrowError where a tensor has been moved, replaced or merged since."""
        merged = [module for module in self.modules if getattr(module, "merged", False)]
        if merged or [tensor.data_ptr() for tensor in self.tensors()] != self.addresses:
            what = "merged into the weights" if merged else "moved or replaced"
            raise BorrowError(
                f"{self.name}: the trainer's tensors were {what} while an engine samples with them. Close the engine "
                "before moving, merging, quantizing or reloading the model, and make a new one"
            )

    def forward(self, x: Tensor) -> Tensor:
        """(N, in) -> (N, sum of out)."""
        loras = [switched(lora_of(module), self.switch) for module in self.modules]
        outputs = forward_linears(x, self.weights, loras)
        for output, module in zip(outputs, self.modules, strict=True):
            if base_of(module).bias is not None:
                output += base_of(module).bias.to(output.dtype)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def base_of(module: Any) -> Any:
    """The linear layer under peft's wrapper, or the module itself."""
    return getattr(module, "base_layer", module)


def lora_of(module: Any) -> LoRA | None:
    """The LoRA that the module would apply now; None for the base model. Raises where there are several."""
    names = [name for name in getattr(module, "active_adapters", []) if name in getattr(module, "lora_A", {})]
    if not names or module.disable_adapters:
        return None
    if len(names) > 1:
        raise BorrowError(f"adapters {names} are active at once; an engine samples with one")
    return LoRA(module.lora_A[names[0]].weight, module.lora_B[names[0]].weight, module.scaling[names[0]])


def switched(lora: LoRA | None, switch: Tensor) -> LoRA | None:
    """The same LoRA times `switch`, which stays on the device."""
    return None if lora is None else LoRA(lora.a * switch, lora.b, lora.scale)


@torch.library.custom_op("lowmem_grpo::borrowed_linear", mutates_args=())
def borrowed_linear(x: Tensor, out_features: int, layer: str) -> Tensor:
    """x (..., in) -> (..., out_features) by the trainer's modules of `layer`."""
    with torch.no_grad():
        return LAYERS[layer].forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], out_features)


@borrowed_linear.register_fake
def _(x: Tensor, out_features: int, layer: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)
