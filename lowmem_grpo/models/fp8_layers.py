"""Frozen linear layers on FP8 weights, which PEFT's LoRA wraps like plain ones, and a quantizer registered with
transformers that loads a model into them.

transformers' FP8 layers have a wrong backward pass or none, and quantize activations too. Here the weight is decoded
band by band in both passes, and multiplied in the compute dtype. A checkpoint in 16 bits is quantized tensor by tensor
while it is read. In an FP8 checkpoint, layers stored in FP8 stay so, whatever the config says.
"""

import logging
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightRenaming, rename_source_key
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowmem_grpo.kernels.fp8 import E4M3, FP8Weight, adjacent_fp8, fp8_quantize, scales_shape
from lowmem_grpo.memory.layer_forms import FP8, FP8_BLOCK
from lowmem_grpo.models.quantized_linear import QuantizedLinear
from lowmem_grpo.models.stored_model import block_of, quantization_of, text_name

NAME = "lowmem_grpo_fp8"  # the quantizer's name
BLOCK = (128, 128)  # for load_in_fp8="block"
SCALE = "weight_scale"  # beside `weight`, under the name that compressed-tensors gives it
SCALES = (".weight_scale", ".weight_scale_inv")  # in compressed-tensors, and in fine-grained FP8
# Scales of a layer's inputs and outputs and of the KV cache, all of which stay in 16 bits here.
OF_ACTIVATIONS = (".input_scale", ".output_scale", ".activation_scale", ".k_scale", ".v_scale", ".input_global_scale")
PLAIN_WAY = "Take the model's checkpoint in 16 bits, and load it with load_in_fp8=True"

logger = logging.getLogger(__name__)


class FP8Linear(QuantizedLinear):
    """A linear layer whose `weight` (out, in) uint8 holds e4m3 codes; `weight_scale` has one float32 per (h, w) block.
    `module.to(dtype)` rounds the scales, and the next product raises ValueError."""

    kind = FP8
    weight_scale: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool, block: tuple[int, int], dtype: torch.dtype,
                 stored: torch.dtype = torch.uint8) -> None:
        nn.Module.__init__(self)  # nn.Linear.__init__ would allocate a 16-bit weight
        self.in_features, self.out_features, self.block, self.compute_dtype = in_features, out_features, block, dtype
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=stored), requires_grad=False)
        self.register_buffer(SCALE, torch.empty(scales_shape((out_features, in_features), block), dtype=torch.float32))
        frozen = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        self.register_parameter("bias", frozen)

    @property
    def frozen(self) -> FP8Weight:
        return FP8Weight.from_codes(self.weight.detach(), self.weight_scale, self.block, self.compute_dtype)

    def parts(self) -> tuple[Any, ...]:
        return self.weight, self.weight_scale, self.block, self.compute_dtype

    @classmethod
    def fuse(cls, layers: Sequence[Any]) -> None:
        """Put the codes of layers in one buffer and their scales in another. ValueError if they do not match."""
        weights = [layer.frozen for layer in layers]
        codes, scales = (torch.cat([getattr(weight, name) for weight in weights]) for name in ("codes", "scales"))
        adjacent_fp8(weights, codes, scales)  # only to check
        parts = zip(codes.split([len(weight.codes) for weight in weights]),
                    scales.split([len(weight.scales) for weight in weights]), strict=True)
        for layer, (rows, theirs) in zip(layers, parts, strict=True):
            layer.weight.data, layer.weight_scale = rows, theirs


def fp8_linears(model: nn.Module) -> Iterator[FP8Linear]:
    return (module for module in model.modules() if isinstance(module, FP8Linear))


def stored_weight(codes: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> FP8Weight:
    """Return the weight from a checkpoint's codes and scales, with scales in float32. A single scale is repeated for
    each row, so that adjacent weights can be joined. ValueError if scales do not fit the codes or are not finite."""
    scales = scales.float()
    if not scales.isfinite().all():
        raise ValueError("its scales are not finite")
    rows, columns = codes.shape
    if scales.numel() == 1 or tuple(scales.shape) in ((rows,), (rows, 1)):
        scales, block = scales.reshape(-1, 1).expand(rows, 1), (1, columns)
    return FP8Weight.from_codes(codes.contiguous(), scales.contiguous(), block, dtype)


def form_in_fp8(model: nn.Module) -> bool | str:
    """Return this model's `load_in_fp8`: False without FP8 layers, "block" with scales by block, otherwise True."""
    layer = next(fp8_linears(model), None)
    return layer is not None and ("block" if layer.block[0] > 1 else True)


@register_quantization_config(NAME)
@dataclass
class FP8Config(QuantizationConfigMixin):
    """A config of FP8 weights: the block of a weight that shares a scale (None: a row), and the dtype of matmuls."""

    quant_method: Any = NAME
    block: Any = None
    compute_dtype: str = "bfloat16"
    names: Any = None  # for a multimodal checkpoint: {pattern of stored names: replacement}


def to_quantize(form: str, dtype: torch.dtype) -> FP8Config:
    """Return the config that quantizes a 16-bit checkpoint to `form`."""
    return FP8Config(block=BLOCK if form == FP8_BLOCK else None, compute_dtype=str(dtype).removeprefix("torch."))


def keep_stored(config: Any, dtype: torch.dtype, names: dict[str, str] | None, quantizer: type[FP8Config]) -> None:
    """Replace the quantizer in a checkpoint's config by this one of ours, which keeps the weights as stored."""
    block = block_of(quantization_of(config) or {})
    for part in (config.get_text_config(), config):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    kind = str(dtype).removeprefix("torch.")
    config.quantization_config = quantizer(block=block, compute_dtype=kind, names=names).to_dict()


@register_quantizer(NAME)
class FP8Quantizer(HfQuantizer):
    """The quantizer that transformers calls while it loads a model into FP8 layers."""

    quantization_config: FP8Config

    @property
    def is_trainable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        """Return False: the FP8 model itself is not saved, only adapters and merged models are."""
        return False

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        path, _, name = param_name.rpartition(".")
        return name == "weight" and isinstance(model.get_submodule(path), FP8Linear)

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        return 1 if self.param_needs_quantization(model, param_name) else super().param_element_size(
            model, param_name, param)

    def get_quantize_ops(self) -> "Quantize":
        return Quantize(self.quantization_config.block)

    def get_weight_conversions(self) -> list[Any]:
        stored, ours = (name.removeprefix(".") for name in (SCALES[1], SCALES[0]))
        return [WeightRenaming(rf"{stored}$", ours)] if self.pre_quantized else []

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        """Put our layers, on the meta device, in place of those that are stored in FP8 or are to be quantized."""
        dtype, block = getattr(torch, self.quantization_config.compute_dtype), self.quantization_config.block
        if self.pre_quantized:
            heads = dict(headers(kwargs["checkpoint_files"]))
            leave_out_activations(model, heads)
            paths, held = stored_in_fp8(model, heads, block, self.quantization_config.names or {}), E4M3
        else:
            left = self.get_modules_to_not_convert(model)
            paths, held = {name: block for name, module in model.named_modules()
                           if type(module) is nn.Linear and should_convert_module(name, left)
                           and ".visual." not in name}, dtype
        for path, blocks in paths.items():
            linear: Any = model.get_submodule(path)
            size = blocks or (1, linear.in_features)
            with torch.device("meta"):
                model.set_submodule(path, FP8Linear(linear.in_features, linear.out_features, linear.bias is not None,
                                                    size, dtype, held))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for path, module in model.named_modules():
            if isinstance(module, FP8Linear) and self.pre_quantized:
                try:
                    weight = stored_weight(module.weight.detach(), module.weight_scale, module.block,
                                           module.compute_dtype)
                except ValueError as error:
                    raise ValueError(f"{path} is stored in FP8, and {error}. {PLAIN_WAY}") from error
                module.weight, module.weight_scale = nn.Parameter(weight.codes, requires_grad=False), weight.scales
                module.block = weight.block
        return model


class Quantize(ConversionOps):
    """The conversion of a 16-bit weight to codes and scales."""

    def __init__(self, block: tuple[int, int] | None) -> None:
        self.block = None if block is None else (int(block[0]), int(block[1]))

    def convert(self, input_dict: dict[str, Any], *patterns: Any, **kwargs: Any) -> dict[str, Any]:
        converted: dict[str, Any] = {}
        for name, tensor in input_dict.items():
            weight = fp8_quantize(tensor[0] if isinstance(tensor, list) else tensor, self.block)
            converted |= {name: weight.codes, f"{name.rpartition('.')[0]}.{SCALE}": weight.scales}
        return converted


def leave_out_activations(model: PreTrainedModel, heads: dict[str, Any]) -> None:
    """Log one line that scales of activations are ignored, and keep transformers from listing them as unexpected."""
    scales = [name for name in heads if name.endswith(OF_ACTIVATIONS)]
    if scales:
        logger.info("%d scales of activations are left out, such as %s: activations stay in 16 bits", len(scales),
                    scales[0])
    # Patterns that models declare and transformers' own quantizers extend (5.19, quantizer_gemma.py); a test fails if
    # the table comes back.
    known = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])
    model._keys_to_ignore_on_load_unexpected = known | {rf"\{ending}$" for ending in OF_ACTIVATIONS}


def stored_in_fp8(model: PreTrainedModel, heads: dict[str, tuple[str, list[int]]], block: tuple[int, int] | None,
                  names: dict[str, str]) -> dict[str, tuple[int, int] | None]:
    """Return {path: block} of the linear layers stored in FP8 (None: one scale per row or per weight). ValueError if
    weights, scales and model do not fit, or an FP8 tensor is not the weight of a decoder's linear layer."""
    check_pairs(heads)
    blocks = {}
    stored = {name: name for name, (kind, _) in heads.items() if kind.startswith("F8_") and not name.endswith(SCALES)}
    for name, path, linear in linears_stored(model, stored, names, "FP8"):
        kind, shape = heads[name]
        if kind != "F8_E4M3":
            raise ValueError(f"{name} is stored in {kind}; of 8-bit floats only e4m3 is read. {PLAIN_WAY}")
        if shape != list(linear.weight.shape):
            raise ValueError(f"{name} is stored in FP8 as {tuple(shape)}, and the model's layer is "
                             f"{tuple(linear.weight.shape)}: the checkpoint and its config.json do not belong "
                             f"together. Fetch the checkpoint again. {PLAIN_WAY}")
        scale = scale_of(name, heads)
        if scale is None:
            raise ValueError(f"{name} is stored in FP8, and its scales ({name.removesuffix('weight')}weight_scale or "
                             "_inv) are missing: without them the weights mean nothing. Fetch the checkpoint again. "
                             + PLAIN_WAY)
        blocks[path] = fitting_block(name, (shape[0], shape[1]), heads[scale][1], block)
    return blocks


def linears_stored(model: PreTrainedModel, stored: dict[str, str], names: dict[str, str], form: str
                   ) -> Iterator[tuple[str, str, nn.Linear]]:
    """Yield (key, path, layer) for the linear layers whose weights have the names `stored` in a 16-bit checkpoint;
    ValueError for another module of the model."""
    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    own, modules = model.state_dict(), dict(model.named_modules())
    for key, name in stored.items():
        text = text_name(name, names)
        if text is None:
            continue
        path = rename_source_key(text, renamings, [], model.base_model_prefix, own)[0].removesuffix(".weight")
        linear = modules.get(path)
        if type(linear) is not nn.Linear or linear is model.get_output_embeddings():
            raise ValueError(f"{key} is stored in {form}, and only linear layers of the decoder may be. {PLAIN_WAY}")
        yield key, path, linear


def check_pairs(heads: dict[str, Any]) -> None:
    """Raise ValueError for scales whose weight is missing: the weight would be initialised at random."""
    for name in heads:
        for ending in SCALES:
            path = name.removesuffix(ending)
            if path != name and f"{path}.weight" not in heads:
                raise ValueError(f"{name} is there, and the weights that it scales ({path}.weight) are missing. Fetch "
                                 f"the checkpoint again. {PLAIN_WAY}")


def scale_of(name: str, stored: Container[str]) -> str | None:
    """Return the name of the stored tensor with a weight's scales; None if there is none."""
    return next((scale for suffix in SCALES if (scale := name.removesuffix(".weight") + suffix) in stored), None)


def fitting_block(name: str, shape: tuple[int, int], scales: list[int],
                  block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the block that shares a scale; None for one scale per row or per weight. ValueError if `scales`, the shape
    of the scales, does not fit the weight's `shape` and `block`."""
    if scales in ([], [1], [1, 1], [shape[0]], [shape[0], 1]):
        return None
    if block is None or tuple(scales) != scales_shape(shape, (block[0], block[1])):
        raise ValueError(f"{name} {shape} is stored in FP8 with scales {tuple(scales)}, which are neither one, nor one "
                         f"for each row, nor one for each block of {block}. {PLAIN_WAY}")
    return block[0], block[1]


def headers(files: Any, kind: str = "weights in FP8") -> Iterator[tuple[str, tuple[str, list[int]]]]:
    """Yield (name, (safetensors' dtype, shape)) of each tensor of a checkpoint; ValueError for other formats."""
    for file in files or []:
        if Path(file).suffix != ".safetensors":
            raise ValueError(f"{Path(file).name} holds {kind}, and only safetensors files are read. {PLAIN_WAY}")
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                part = opened.get_slice(name)
                yield name, (part.get_dtype(), part.get_shape())
