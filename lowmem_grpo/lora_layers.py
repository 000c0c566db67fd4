"""PEFT's LoRA layers on our kernel: one autograd node that keeps x alone, where PEFT's own keep several tensors.

PEFT makes them itself, through its mapping of custom modules; all that it does with adapters (switching, loading,
saving, merging) is inherited. What the kernel does not cover goes PEFT's own way: mixed precision, dropout in training,
several active adapters, variants of LoRA, merged weights.
"""

from functools import cache
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor, nn

from lowmem_grpo.kernels.lora import LoRA, lora_linear


def use_kernel_layers(config: LoraConfig, model: nn.Module) -> None:
    """Let PEFT make our layers for the model's linear ones, plain and in NF4."""
    four_bit = {type(module) for module in model.modules() if is_nf4(module)}
    kinds = {kind: kernel_linear_4bit() for kind in four_bit} | {nn.Linear: KernelLinear}
    # PEFT's guide to custom models describes the call; a test fails where it goes away. Exact types: the first match
    # counts, and the layers of bitsandbytes are kinds of nn.Linear.
    config._register_custom_module(kinds)


class OneNode:
    """The forward pass of a LoRA layer of which all else is PEFT's."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x (..., in) -> (..., out)."""
        if args or kwargs or not computes(self, x):
            result: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return result
        (y,) = lora_linear(x, [self.base_layer.weight], [active_lora(self)], [self.base_layer.bias])
        return y


class KernelLinear(OneNode, Linear):
    """On weights in 16 or 32 bits."""


@cache
def kernel_linear_4bit() -> type[nn.Module]:
    """The same on weights in 4 bits; PEFT has the class where bitsandbytes is installed."""
    from peft.tuners.lora import Linear4bit

    return type("KernelLinear4bit", (OneNode, Linear4bit), {"__doc__": "On weights in NF4."})


def is_nf4(module: Any) -> bool:
    """Whether it is a layer of bitsandbytes in NF4."""
    state = getattr(getattr(module, "weight", None), "quant_state", None)
    return state is not None and state.quant_type == "nf4"


def computes(layer: nn.Module, x: Tensor) -> bool:
    """Whether our kernel gives what the layer gives for x: a plain linear layer, or one under a `OneNode`."""
    base: Any = getattr(layer, "base_layer", layer)
    dtype = base.weight.quant_state.dtype if is_nf4(base) else base.weight.dtype
    if dtype != x.dtype or getattr(base, "compute_dtype", dtype) not in (None, dtype):
        return False
    if torch.is_autocast_enabled(x.device.type) or base.weight.requires_grad:
        return False
    return base is layer or (isinstance(layer, OneNode) and is_plain(layer))


def is_plain(layer: Any) -> bool:
    """Whether what the layer computes now is at most one LoRA without dropout, bias or variants."""
    if layer.disable_adapters:
        return not layer.merged
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    dropped = any(layer.training and not isinstance(layer.lora_dropout[name], nn.Identity) for name in active)
    special = any(name in layer.lora_variant or layer.lora_bias[name] for name in active)
    return not (layer.merged or len(active) > 1 or dropped or special)


def active_lora(layer: Any) -> LoRA | None:
    """The pair that a plain layer computes with now; None without LoRA."""
    if not hasattr(layer, "lora_A") or layer.disable_adapters:
        return None
    for name in layer.active_adapters:
        if name in layer.lora_A:
            return LoRA(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])
    return None
