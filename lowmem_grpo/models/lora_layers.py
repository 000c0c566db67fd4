"""PEFT's LoRA layers on our kernel: one autograd node that saves only x, where PEFT's own save several tensors.

PEFT itself creates these layers, through its mapping of custom modules, so adapters are switched, loaded, saved and
merged as usual. PEFT's own forward pass still computes the cases that the kernel does not cover: mixed precision,
dropout in training, several active adapters, variants of LoRA, merged weights.
"""

from collections.abc import Sequence
from operator import is_not
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear, Linear4bit, LoraLayer
from torch import Tensor, nn

from lowmem_grpo.kernels.frozen_weight import FrozenWeight, frozen_weight, kept_weight
from lowmem_grpo.kernels.lora import lora_linear
from lowmem_grpo.kernels.lora_factors import KEPT, LoRA, held
from lowmem_grpo.models.expert_lora import ExpertLoRA
from lowmem_grpo.models.experts import ExpertStack
from lowmem_grpo.models.fused_weights import joined_weights
from lowmem_grpo.models.quantized_linear import QuantizedLinear, quantized_linears


def use_kernel_layers(config: LoraConfig, model: nn.Module) -> None:
    """Make PEFT create our LoRA layers for the model's linear layers, plain and quantized, and for experts."""
    kinds: dict[type[nn.Module], type[nn.Module]] = {
        type(module): KernelLinear4bit for module in model.modules() if is_nf4(module)}
    kinds |= {type(module): KernelLinearQuantized for module in quantized_linears(model)}
    kinds |= {nn.Linear: KernelLinear, ExpertStack: ExpertLoRA}
    # PEFT's guide to custom models describes this call; a test fails if it goes away. The types are exact because the
    # first match counts and bitsandbytes' layers are subclasses of nn.Linear.
    config._register_custom_module(kinds)


class OneNode:
    """A mixin with the forward pass of a LoRA layer on our kernel; everything else is PEFT's."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        loras = None if args or kwargs else loras_of(x, [self], self)
        if loras is None:
            result: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return result
        (y,) = lora_linear(x, [known_weight(self.base_layer)], loras, [self.base_layer.bias])
        return y


class KernelLinear(OneNode, Linear):
    """A LoRA layer on weights in 16 or 32 bits."""


class KernelLinearQuantized(OneNode, Linear):
    """A LoRA layer on a `QuantizedLinear`."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raise ValueError: quantized weights are not merged in place."""
        base: Any = self.base_layer
        raise ValueError(f"an adapter is not merged into weights in {base.kind.upper()}, which would round most of its "
                         "update away. Save the merged model in 16 bits: save_pretrained_merged(folder, tokenizer, "
                         '"merged_16bit")')


class KernelLinear4bit(OneNode, Linear4bit):
    """A LoRA layer on weights in NF4."""


class JoinedWeights:
    """A cache of the weights of layers that share an input, joined if they are quantized and adjacent."""

    def __init__(self) -> None:
        self.weights: list[FrozenWeight] = []
        self.found: list[FrozenWeight] = []

    def join(self, layers: Sequence[Any]) -> list[FrozenWeight]:
        """Return one weight per layer, or a single one if the layers' weights are quantized and adjacent."""
        weights = [known_weight(base_of(layer)) for layer in layers]
        if len(weights) != len(self.weights) or any(map(is_not, weights, self.weights)):
            quantized = len(weights) > 1 and all(weight.quantized for weight in weights)
            whole = joined_weights(weights) if quantized else None
            self.weights, self.found = weights, weights if whole is None else [whole]
        return self.found

    def __deepcopy__(self, memo: dict[int, Any]) -> "JoinedWeights":
        return JoinedWeights()  # the copy belongs to other layers


def parts_of(base: Any) -> tuple[Any, ...]:
    """Return the objects that make up a layer's weight: moving, replacing or quantizing it replaces one of them."""
    if isinstance(base, QuantizedLinear):
        return base.parts()
    weight, state = base.weight, getattr(base.weight, "quant_state", None)
    return (weight, weight.dtype) if state is None else (weight, state, state.absmax, state.dtype)


def held_weight(base: Any) -> FrozenWeight:
    """Return the frozen weight of a linear layer as the kernels take it."""
    return base.frozen if isinstance(base, QuantizedLinear) else frozen_weight(base.weight)


def known_weight(base: Any) -> FrozenWeight:
    """Return `held_weight(base)`, the same object until the layer's weight is moved, replaced or quantized."""
    return kept_weight(base, parts_of(base), lambda: held_weight(base))


def one_node(x: Tensor, layers: Sequence[Any], weights: JoinedWeights) -> Sequence[Tensor]:
    """Return each layer's output for x. If our kernel covers all of them, one autograd node saves x for all."""
    loras = loras_of(x, layers, weights)
    if loras is None:
        return [layer(x) for layer in layers]
    return lora_linear(x, weights.join(layers), loras, [base_of(layer).bias for layer in layers])


def loras_of(x: Tensor, layers: Sequence[Any], owner: object) -> list[LoRA | None] | None:
    """Return each layer's active LoRA pair; None if our kernel does not cover all layers for x. During sampling the
    result is cached by `owner`, because finding the pairs takes as long as a small matrix product."""
    if KEPT.get() is None:
        return found_loras(x, layers)
    lora = next((layer for layer in layers if isinstance(layer, OneNode)), None)
    state = () if lora is None else (lora.training, lora.disable_adapters, *lora.active_adapters)  # type: ignore[attr-defined]
    key = (id(owner), x.dtype, torch.is_autocast_enabled(x.device.type), *state)
    loras: list[LoRA | None] | None = held(key, owner, lambda: found_loras(x, layers))
    return loras


def found_loras(x: Tensor, layers: Sequence[Any]) -> list[LoRA | None] | None:
    return [active_lora(layer) for layer in layers] if all(computes(layer, x) for layer in layers) else None


def base_of(layer: Any) -> Any:
    """Return the linear layer itself, without PEFT's wrapper."""
    return getattr(layer, "base_layer", layer)


def is_nf4(module: Any) -> bool:
    state = getattr(getattr(module, "weight", None), "quant_state", None)
    return state is not None and state.quant_type == "nf4"


def computes(layer: nn.Module, x: Tensor) -> bool:
    """Return whether our kernel covers the layer for x: a plain linear layer, or one wrapped by a plain `OneNode`."""
    base = base_of(layer)
    if isinstance(base, QuantizedLinear):
        dtype = base.compute_dtype
    else:
        dtype = base.weight.quant_state.dtype if is_nf4(base) else base.weight.dtype
    if dtype != x.dtype or getattr(base, "compute_dtype", dtype) not in (None, dtype):
        return False
    if torch.is_autocast_enabled(x.device.type) or base.weight.requires_grad:
        return False
    return base is layer or (isinstance(layer, OneNode) and is_plain(layer))


def is_plain(layer: Any) -> bool:
    """Return whether the layer's active LoRA is plain: at most one, without dropout, bias, variants or merging."""
    if layer.disable_adapters:
        return not layer.merged
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    dropped = any(layer.training and not isinstance(layer.lora_dropout[name], nn.Identity) for name in active)
    special = any(name in layer.lora_variant or layer.lora_bias[name] for name in active)
    return not (layer.merged or len(active) > 1 or dropped or special)


def adapter_state(model: nn.Module) -> tuple[object, ...]:
    """Return each LoRA layer's active and merged adapters and scales, on which passes without gradient depend."""
    return tuple((layer.disable_adapters, *layer.merged_adapters, "active", *layer.active_adapters,
                  *layer.scaling.items()) for layer in model.modules() if isinstance(layer, LoraLayer))


def active_lora(layer: Any) -> LoRA | None:
    """Return the active LoRA pair of a plain layer; None without LoRA."""
    if not hasattr(layer, "lora_A") or layer.disable_adapters:
        return None
    for name in layer.active_adapters:
        if name in layer.lora_A:
            return LoRA(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])
    return None
