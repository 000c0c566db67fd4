"""Linear layers with a quantized frozen weight, and the form of a model's weights."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_grpo.kernels.frozen import frozen_linear
from lowmem_grpo.kernels.frozen_weight import KINDS, FrozenWeight, kept_weight
from lowmem_grpo.memory.layer_forms import BITS_16, MXFP4, NF4


class QuantizedLinear(nn.Linear):
    """A linear layer on a quantized weight, which PEFT's LoRA wraps like a plain one. A kind of weight for which
    a loader makes layers has a subclass. `compute_dtype` is the dtype of matmuls; setting it changes no stored
    number."""

    kind: str  # that of the weight
    compute_dtype: torch.dtype
    bias: nn.Parameter | None  # type: ignore[assignment]  # torch declares it as never None

    def __init__(self, weight: FrozenWeight) -> None:
        """Hold a weight's tensors: the first as `weight`, the others as buffers."""
        nn.Module.__init__(self)  # nn.Linear.__init__ would allocate a 16-bit weight
        self.kind, self.compute_dtype, (self.out_features, self.in_features) = weight.kind, weight.dtype, weight.shape
        first, *others = weight.tensors
        self.weight, self.sizes = nn.Parameter(first, requires_grad=False), weight.sizes
        for number, tensor in enumerate(others):
            self.register_buffer(f"part{number}", tensor)
        self.register_parameter("bias", None)

    @property
    def frozen(self) -> FrozenWeight:
        """The weight as the kernels take it; ValueError if its tensors were cast to another dtype."""
        tensors = [self.weight.detach(), *self.buffers(recurse=False)]
        return KINDS[self.kind].from_parts(tensors, self.sizes, [self.out_features], self.compute_dtype)

    def parts(self) -> tuple[Any, ...]:
        """Return the objects that make up the weight: moving or replacing it replaces one of them."""
        return self.weight, *self.buffers(recurse=False), self.compute_dtype

    @classmethod
    def fuse(cls, layers: Sequence[Any]) -> None:
        """Lay the layers' weights out side by side. ValueError, with nothing changed, if they cannot be."""
        raise ValueError(f"weights in {cls.kind} are not laid out side by side")

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out), in the dtype of x, or in autocast's dtype if autocast is on."""
        device = x.device.type
        mixed = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if mixed else self.compute_dtype
        bias = self.bias if self.bias is None else self.bias.to(dtype)
        y = frozen_linear(x.to(dtype), kept_weight(self, self.parts(), lambda: self.frozen), bias)
        return y if mixed else y.to(x.dtype)


def quantized_linears(model: nn.Module) -> Iterator[QuantizedLinear]:
    return (module for module in model.modules() if isinstance(module, QuantizedLinear))


def linears_in_4bit(model: nn.Module) -> Iterator[Any]:
    """Return an iterator over bitsandbytes' layers, and stacks of experts, in 4 bits."""
    return (module for module in model.modules() if getattr(getattr(module, "weight", None), "quant_state", None))


def form_of(model: nn.Module) -> str:
    """Return the form of a model's linear weights, or of its experts, as plans name it (memory/layer_forms.py)."""
    ours = next(quantized_linears(model), None)
    if ours is not None:
        return ours.kind
    packed = any(getattr(module, "kind", None) == MXFP4 for module in model.modules())
    return NF4 if any(linears_in_4bit(model)) else MXFP4 if packed else BITS_16
