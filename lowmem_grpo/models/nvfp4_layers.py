"""Frozen linear layers on NVFP4 weights, and a quantizer registered with transformers that reads a checkpoint of
compressed-tensors in `nvfp4-pack-quantized` into them, as it is stored.

Only weights are in 4 bits (W4A16): the scales of activations that W4A4 checkpoints have too are left out. A checkpoint
has tensors of exactly the sizes that its layers need: padding is refused, and so never read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.auto import register_quantization_config, register_quantizer

from lowmem_grpo.kernels.fp8 import E4M3
from lowmem_grpo.kernels.nvfp4 import BLOCK, NVFP4Weight
from lowmem_grpo.memory.layer_forms import NVFP4
from lowmem_grpo.models.fp8_layers import (
    PLAIN_WAY,
    FP8Config,
    FP8Quantizer,
    headers,
    leave_out_activations,
    linears_stored,
)
from lowmem_grpo.models.quantized_linear import QuantizedLinear

NAME = "lowmem_grpo_nvfp4"  # the quantizer's name
PARTS_IN_NVFP4 = PACKED, SCALE, GLOBAL = ".weight_packed", ".weight_scale", ".weight_global_scale"


class NVFP4Linear(QuantizedLinear):
    """A linear layer whose `weight` (out, in / 2) uint8 holds NVFP4 codes; scales and divisors are buffers."""

    kind = NVFP4

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # nn.Linear.__init__ would allocate a 16-bit weight
        self.in_features, self.out_features, self.compute_dtype, self.sizes = in_features, out_features, dtype, []
        codes = torch.empty(out_features, in_features // 2, dtype=torch.uint8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("weight_scale", torch.empty(out_features, in_features // BLOCK, dtype=E4M3))
        self.register_buffer("weight_global_scale", torch.empty(1, dtype=torch.float32))
        frozen = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        self.register_parameter("bias", frozen)

    def hold(self, codes: Tensor, scales: Tensor, divisors: Tensor) -> None:
        self.weight.data, self.weight_scale, self.weight_global_scale = codes, scales, divisors

    @classmethod
    def fuse(cls, layers: Sequence[Any]) -> None:
        """Put codes, scales and divisors of layers in one buffer each. ValueError if they do not match."""
        weights = [layer.frozen for layer in layers]
        if len({(weight.shape[1], weight.dtype) for weight in weights}) > 1:
            raise ValueError(f"the weights differ in width or dtype: {[(w.shape[1], w.dtype) for w in weights]}")
        sizes = [len(weight.codes) for weight in weights]
        parts = (torch.cat(part).split(sizes) for part in zip(*(weight.tensors for weight in weights), strict=True))
        for layer, tensors in zip(layers, zip(*parts, strict=True), strict=True):
            layer.hold(*tensors)


@register_quantization_config(NAME)
@dataclass
class NVFP4Config(FP8Config):
    """A config of NVFP4 weights: the dtype of matmuls, and the names of a multimodal checkpoint."""

    quant_method: Any = NAME


@register_quantizer(NAME)
class NVFP4Quantizer(FP8Quantizer):
    """The quantizer that transformers calls while it loads a model into NVFP4 layers."""

    def get_weight_conversions(self) -> list[Any]:
        return [WeightRenaming(rf"{PACKED[1:]}$", "weight")]

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        """Put our layers, on the meta device, in place of those that are stored in NVFP4."""
        heads, config = dict(headers(kwargs["checkpoint_files"], "weights in NVFP4")), self.quantization_config
        leave_out_activations(model, heads)
        weights, dtype = {path: f"{path}.weight" for path in paths_in(heads)}, getattr(torch, config.compute_dtype)
        for stored, path, linear in linears_stored(model, weights, config.names or {}, "NVFP4"):
            check_sizes(stored, linear, heads)
            with torch.device("meta"):
                model.set_submodule(path, NVFP4Linear(linear.in_features, linear.out_features,
                                                      linear.bias is not None, dtype))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for path, module in model.named_modules():
            if isinstance(module, NVFP4Linear):
                try:
                    weight = NVFP4Weight.from_codes(module.weight.detach(), module.weight_scale,
                                                    module.weight_global_scale, module.compute_dtype)
                except ValueError as error:
                    raise ValueError(f"{path} is stored in NVFP4, and {error}. {PLAIN_WAY}") from error
                module.hold(*weight.tensors)
        return model


def paths_in(names: Any) -> list[str]:
    """Return the paths of the modules of which a checkpoint with tensors of these names has a part of NVFP4."""
    return sorted({name.removesuffix(part) for name in names for part in PARTS_IN_NVFP4 if name.endswith(part)})


def check_sizes(path: str, linear: nn.Linear, heads: dict[str, tuple[str, list[int]]]) -> None:
    """Raise ValueError if a tensor of a layer is missing, or has another dtype or shape than NVFP4's."""
    rows, columns = linear.weight.shape
    wanted = {PACKED: ("U8", [rows, columns // 2]), SCALE: ("F8_E4M3", [rows, columns // BLOCK]), GLOBAL: ("F32", [1])}
    for ending, want in wanted.items():
        got = heads.get(path + ending)
        if got != want or columns % BLOCK:
            raise ValueError(
                f"{path}{ending} is {'missing' if got is None else f'{got[0]} {tuple(got[1])}'}; a layer of {rows} x "
                f"{columns} weights in NVFP4 has there {want[0]} {tuple(want[1])}, and {BLOCK} columns share a scale. "
                f"Fetch the checkpoint again. {PLAIN_WAY}")
