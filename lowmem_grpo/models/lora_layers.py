"""PEFT's LoRA layers on our kernel: one autograd node that keeps only x, where PEFT's own keep several tensors.

PEFT itself makes these layers, through its mapping of custom modules, and they inherit all that it does with adapters
(switching, loading, saving, merging). PEFT's own forward pass still computes what the kernel does not cover: mixed
precision, dropout in training, several active adapters, variants of LoRA, merged weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear, Linear4bit, LoraLayer
from torch import Tensor, nn

from lowmem_grpo.kernels.frozen import FrozenWeight
from lowmem_grpo.kernels.lora import frozen_weight, lora_linear
from lowmem_grpo.kernels.lora_factors import KEPT, LoRA, held
from lowmem_grpo.models.fp8_linear import FP8Linear
from lowmem_grpo.models.fused_weights import joined_weights


def use_kernel_layers(config: LoraConfig, model: nn.Module) -> None:
    """Let PEFT make our layers for the model's linear ones, plain, in NF4 and in FP8."""
    kinds: dict[type[nn.Module], type[nn.Module]] = {
        type(module): KernelLinear4bit for module in model.modules() if is_nf4(module)}
    kinds |= {FP8Linear: KernelLinearFP8, nn.Linear: KernelLinear}
    # PEFT's guide to custom models describes this call, and a test fails if it goes away. We name exact types because
    # the first match counts and the layers of bitsandbytes are subclasses of nn.Linear.
    config._register_custom_module(kinds)


class OneNode:
    """The forward pass of a LoRA layer; everything else is PEFT's."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        loras = None if args or kwargs else loras_of(x, [self], self)
        if loras is None:
            result: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return result
        (y,) = lora_linear(x, [held_weight(self.base_layer)], loras, [self.base_layer.bias])
        return y


class KernelLinear(OneNode, Linear):
    """On weights in 16 or 32 bits."""


class KernelLinearFP8(OneNode, Linear):
    """On weights in FP8."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """ValueError: such weights are not merged in place."""
        raise ValueError("an adapter is not merged into weights in FP8, which would round most of its update away. "
                         'Save the merged model in 16 bits: save_pretrained_merged(folder, tokenizer, "merged_16bit")')


class KernelLinear4bit(OneNode, Linear4bit):
    """On weights in NF4."""


class JoinedWeights:
    """The frozen weights of layers on one input, as the kernels take them: adjacent quantized weights as one. Kept for
    as long as the layers have the same tensors."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.found: list[FrozenWeight] = []

    def join(self, layers: Sequence[Any]) -> list[FrozenWeight]:
        """One for each layer, or one for all."""
        parts = [part for layer in layers for part in parts_of(base_of(layer))]
        if len(parts) != len(self.parts) or any(part is not old for part, old in zip(parts, self.parts, strict=True)):
            weights = [held_weight(base_of(layer)) for layer in layers]
            quantized = len(weights) > 1 and not any(isinstance(weight, Tensor) for weight in weights)
            whole = joined_weights(weights) if quantized else None
            self.parts, self.found = parts, weights if whole is None else [whole]
        return self.found

    def __deepcopy__(self, memo: dict[int, Any]) -> "JoinedWeights":
        return JoinedWeights()  # the copy belongs to other layers


def parts_of(base: Any) -> tuple[Any, ...]:
    """The objects that change when a layer's weight is moved, replaced or quantized."""
    weight = base.weight
    if isinstance(base, FP8Linear):
        return weight, base.weight_scale, base.compute_dtype
    state = getattr(weight, "quant_state", None)
    return (weight,) if state is None else (weight, state, state.absmax, state.dtype)


def held_weight(base: Any) -> FrozenWeight:
    """The frozen weight of a linear layer, as the kernels take it."""
    return base.frozen if isinstance(base, FP8Linear) else frozen_weight(base.weight)


def one_node(x: Tensor, layers: Sequence[Any], weights: JoinedWeights) -> Sequence[Tensor]:
    """The output of each layer for x: by one autograd node that keeps x once, if our kernel covers all of them."""
    loras = loras_of(x, layers, weights)
    if loras is None:
        return [layer(x) for layer in layers]
    return lora_linear(x, weights.join(layers), loras, [base_of(layer).bias for layer in layers])


def loras_of(x: Tensor, layers: Sequence[Any], owner: object) -> list[LoRA | None] | None:
    """The pairs that these layers of `owner` compute with now; None where our kernel does not cover all of them for x.
    Sampling keeps the answer for as long as it keeps the pairs, since it takes as long as a small product."""
    if KEPT.get() is None:
        return found_loras(x, layers)
    lora = next((layer for layer in layers if isinstance(layer, OneNode)), None)
    state = () if lora is None else (lora.training, lora.disable_adapters, *lora.active_adapters)  # type: ignore[attr-defined]
    key = (id(owner), x.dtype, torch.is_autocast_enabled(x.device.type), *state)
    loras: list[LoRA | None] | None = held(key, owner, lambda: found_loras(x, layers))
    return loras


def found_loras(x: Tensor, layers: Sequence[Any]) -> list[LoRA | None] | None:
    """Return what `loras_of` does, looked up anew."""
    return [active_lora(layer) for layer in layers] if all(computes(layer, x) for layer in layers) else None


def base_of(layer: Any) -> Any:
    """The linear layer itself, without what PEFT wraps around it."""
    return getattr(layer, "base_layer", layer)


def is_nf4(module: Any) -> bool:
    state = getattr(getattr(module, "weight", None), "quant_state", None)
    return state is not None and state.quant_type == "nf4"


def computes(layer: nn.Module, x: Tensor) -> bool:
    """Return whether our kernel computes what the layer would for x: a plain linear layer, or one under a `OneNode`."""
    base = base_of(layer)
    if isinstance(base, FP8Linear):
        dtype = base.compute_dtype
    else:
        dtype = base.weight.quant_state.dtype if is_nf4(base) else base.weight.dtype
    if dtype != x.dtype or getattr(base, "compute_dtype", dtype) not in (None, dtype):
        return False
    if torch.is_autocast_enabled(x.device.type) or base.weight.requires_grad:
        return False
    return base is layer or (isinstance(layer, OneNode) and is_plain(layer))


def is_plain(layer: Any) -> bool:
    """Return whether the layer now computes at most one LoRA, without dropout, bias or variants."""
    if layer.disable_adapters:
        return not layer.merged
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    dropped = any(layer.training and not isinstance(layer.lora_dropout[name], nn.Identity) for name in active)
    special = any(name in layer.lora_variant or layer.lora_bias[name] for name in active)
    return not (layer.merged or len(active) > 1 or dropped or special)


def adapter_state(model: nn.Module) -> tuple[object, ...]:
    """Return what passes without gradient decide by: of each layer which adapters are active, their scales, merged."""
    return tuple((layer.disable_adapters, *layer.merged_adapters, "active", *layer.active_adapters,
                  *layer.scaling.items()) for layer in model.modules() if isinstance(layer, LoraLayer))


def active_lora(layer: Any) -> LoRA | None:
    """The pair that a plain layer computes with now; None without LoRA."""
    if not hasattr(layer, "lora_A") or layer.disable_adapters:
        return None
    for name in layer.active_adapters:
        if name in layer.lora_A:
            return LoRA(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])
    return None
