"""Quantizers for transformers that load a mixture of experts in NF4, where transformers' own leave experts in 16 bits,
and gpt-oss's experts in MXFP4 as they are stored.

The experts of a layer are quantized one by one, and their 16-bit tensors are freed on the way. Scales are quantized
once for all experts of a stack: the result equals bitsandbytes' for the whole stack as one matrix, bit for bit.
"""

from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes.functional import QuantState, get_4bit_type, quantize_4bit, quantize_blockwise
from bitsandbytes.nn import Params4bit
from torch import Tensor
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowmem_grpo.kernels.mxfp4 import BLOCK as PACKED_BLOCK
from lowmem_grpo.memory.families import experts_in_mxfp4
from lowmem_grpo.memory.layer_forms import BLOCK, NESTED_BLOCK
from lowmem_grpo.models.experts import STACKS, ExpertStack, PackedStack, expert_stacks, use_routed_blocks
from lowmem_grpo.models.fp8_layers import headers

NAME, PACKED = "lowmem_grpo_nf4_experts", "lowmem_grpo_mxfp4_experts"  # the quantizers' names
NF4_OPTIONS: dict[str, Any] = {"blocksize": BLOCK, "quant_type": "nf4"}
DAMAGED = "fetch the model again"
TAKE = "load it with transformers and save it with save_pretrained, which writes each expert by itself"


@register_quantization_config(NAME)
class ExpertsNF4Config(BitsAndBytesConfig):
    """NF4 with double quantization for linear layers and for experts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.quant_method: Any = NAME


@register_quantizer(NAME)
class ExpertsNF4Quantizer(Bnb4BitHfQuantizer):
    """The quantizer that transformers calls while loading: bitsandbytes' for linear layers, ours for experts. Experts
    that are stored in MXFP4 stay so."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, device_map: Any = None,
                                             **kwargs: Any) -> None:
        """Put our blocks in place, on the meta device. ValueError if an expert's size is not a multiple of the scale
        block, or an expert is not in the checkpoint."""
        super()._process_model_before_weight_loading(model, device_map, **kwargs)
        files = kwargs.get("checkpoint_files")
        self.stacked = experts_in_mxfp4(model.config)
        self.packed = self.stacked and any(name.endswith("_blocks") for name, _ in headers(files or (), "experts"))
        if self.packed:
            use_packed_stacks(model, self.quantization_config.bnb_4bit_compute_dtype)
            return
        use_routed_blocks(model)
        for stack in expert_stacks(model):
            if stack.rows * stack.columns % BLOCK:
                raise ValueError(f"an expert's matrix is {stack.rows} x {stack.columns}, which does not end with a "
                                 f"block of {BLOCK} weights: in 4 bits two experts would share a scale. Load the model "
                                 "with load_in_4bit=False")
        if files is not None and not self.stacked:
            check_stored(model, files)  # a GGUF file holds all experts of a layer in one tensor

    def update_weight_conversions(self, weight_conversions: list[Any]) -> list[Any]:
        """Replace transformers' conversions for experts, which merge them into one 16-bit tensor, by ours."""
        kept = [conversion for conversion in weight_conversions if not (
            isinstance(conversion, WeightConverter) and "experts" in " ".join(conversion.target_patterns))]
        if self.packed:
            return [*kept, *packed_names(), *self.get_weight_conversions()]
        ours = [WeightConverter([rf"mlp.experts.{name}$"] if self.stacked else
                                [f"mlp.experts.*.{part}.weight" for part in parts], f"mlp.experts.{name}.weight",
                                operations=[QuantizeExperts()]) for name, parts in STACKS.items()]
        return [*kept, *ours, *self.get_weight_conversions()]


def check_stored(model: PreTrainedModel, files: Any) -> None:
    """Raise ValueError if the files lack an expert's matrix, or store experts under other names."""
    prefix = f"{model.base_model_prefix}."
    names = {name.removeprefix(prefix) for name, _ in headers(files, "experts")}
    for path, stack in model.named_modules():
        if isinstance(stack, ExpertStack):
            parent, _, kind = path.removeprefix(prefix).rpartition(".")
            wanted = {f"{parent}.{number}.{part}.weight" for number in range(stack.experts) for part in STACKS[kind]}
            if missing := sorted(wanted - names):
                raise ValueError(f"the checkpoint holds no {prefix}{missing[0]}. Fetch it again; or, if it stores "
                                 f"experts under other names, {TAKE}")


class QuantizeExperts(ConversionOps):
    """The conversion of the matrices of a layer's experts to one stack in NF4."""

    def convert(self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str],
                **kwargs: Any) -> dict[str, Any]:
        name = kwargs["full_layer_name"]
        experts = kwargs["model"].get_submodule(name.removesuffix(".weight")).experts
        parts = [input_dict[pattern] for pattern in source_patterns]
        if parts[0][0].ndim == 3:  # all experts in one tensor (E, in, out)
            parts = [list(whole.mT) for (whole,) in parts]
        return {name: quantized_stack(parts, experts)}


@register_quantization_config(PACKED)
@dataclass
class ExpertsMXFP4Config(QuantizationConfigMixin):
    """A config of experts in MXFP4 that stay as they are stored; `compute_dtype` is that of their products."""

    quant_method: Any = PACKED
    compute_dtype: str = "bfloat16"


def keep_packed(config: Any, dtype: torch.dtype) -> None:
    """Replace the quantizer in the config of a checkpoint with experts in MXFP4 by ours."""
    config.quantization_config = ExpertsMXFP4Config(compute_dtype=str(dtype).removeprefix("torch.")).to_dict()


@register_quantizer(PACKED)
class ExpertsMXFP4Quantizer(HfQuantizer):
    """The quantizer that transformers calls while it loads experts in MXFP4; it converts nothing."""

    quantization_config: ExpertsMXFP4Config

    @property
    def is_trainable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        """Return False: the model itself is not saved, only adapters and merged models are."""
        return False

    def get_weight_conversions(self) -> list[Any]:
        return packed_names()

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        use_packed_stacks(model, getattr(torch, self.quantization_config.compute_dtype))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        return model  # `check_packed` is called once it is known that no tensor is missing


def packed_names() -> list[WeightRenaming]:
    """Return the new names of the tensors of stacks in MXFP4."""
    return [WeightRenaming(rf"mlp.experts.{name}_{part}$", f"mlp.experts.{name}.{part}")
            for name in STACKS for part in ("blocks", "scales")]


def use_packed_stacks(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Put our blocks in place, on the meta device; ValueError if a row of an expert ends within a block of 32."""
    with torch.device("meta"):
        use_routed_blocks(model, lambda weight: PackedStack(weight.shape, dtype))
    for stack in expert_stacks(model):
        if stack.columns % PACKED_BLOCK:
            raise ValueError(f"an expert's rows have {stack.columns} weights, which do not end with a block of "
                             f"{PACKED_BLOCK}; {DAMAGED}")


def check_packed(model: PreTrainedModel) -> None:
    """Raise ValueError, with its name, for a stack in MXFP4 that is damaged."""
    for path, stack in model.named_modules():
        if isinstance(stack, PackedStack):
            try:
                stack.check()
            except ValueError as error:
                raise ValueError(f"{path} is stored in MXFP4, and {error}; {DAMAGED}") from error


def quantized_stack(parts: list[list[Tensor]], experts: int) -> Params4bit:
    """Return the matrices of all experts as one stack in NF4. An expert's matrix is the concatenation of its tensors
    (n, in) from all lists of `parts`, such as its gate and its up projection. The lists are emptied on the way."""
    first = torch.cat([part[0] for part in parts])
    size, (device, dtype, shape) = first.numel(), (first.device, first.dtype, first.shape)
    packed = torch.empty(experts * size // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(experts * size // BLOCK, dtype=torch.float32, device=device)
    for number in range(experts):
        matrix = torch.cat([part.pop(0) for part in parts])
        codes, state = quantize_4bit(matrix, **NF4_OPTIONS)
        packed[number * size // 2 : (number + 1) * size // 2] = codes.flatten()
        scales[number * size // BLOCK : (number + 1) * size // BLOCK] = state.absmax
    offset = scales.mean()
    absmax, nested = quantize_blockwise(scales - offset, blocksize=NESTED_BLOCK)
    state = QuantState(
        absmax=absmax, shape=torch.Size((experts * shape[0], shape[1])), dtype=dtype, offset=offset, state2=nested,
        code=get_4bit_type("nf4", device=device), **NF4_OPTIONS,
    )
    return Params4bit(packed[:, None], requires_grad=False, quant_state=state, bnb_quantized=True, **NF4_OPTIONS)
