"""A block of routed experts on our operation, which replaces transformers' block while a model is loaded, and a
quantizer registered with transformers that loads experts in NF4, where its own leaves them in 16 bits.

The block keeps transformers' router, frozen but not detached: gates carry gradient to the hidden states. Gates are
computed and renormalised in float32, and not rounded to 16 bits as in transformers, so that trainer and engines
multiply by the same numbers. `RoutedBlock.chosen` decides which experts a token takes; routing is recorded and
replayed there.

The experts of a layer are quantized one by one, and each is freed at once. Scales are quantized once for all experts
of a stack, so the result equals bitsandbytes' result for the whole stack as one matrix, bit for bit.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from bitsandbytes.functional import QuantState, get_4bit_type, quantize_4bit, quantize_blockwise
from bitsandbytes.nn import Params4bit
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from lowmem_grpo.kernels.frozen import FrozenStack
from lowmem_grpo.kernels.nf4 import NF4Weight
from lowmem_grpo.kernels.routed_experts import routed_experts
from lowmem_grpo.memory.families import family_of, has_experts
from lowmem_grpo.memory.layer_forms import BLOCK, NESTED_BLOCK
from lowmem_grpo.models.fp8_layers import headers

Choice = Callable[[int, Tensor], Tensor]  # (index of the block, ids that its router chose) -> ids to use
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # matrices joined in each stack
BROUGHT = ("the model is a mixture of experts whose linear layers are in 4 bits, and its experts are not: they would "
           "stay in 16 bits, which is nearly all of it. Load it with FastLanguageModel.from_pretrained(name, "
           "load_in_4bit=True)")
NAME = "lowmem_grpo_nf4_experts"  # the quantizer's name
NF4_OPTIONS: dict[str, Any] = {"blocksize": BLOCK, "quant_type": "nf4"}
TAKE = "load it with transformers and save it with save_pretrained, which writes each expert by itself"


class ExpertStack(nn.Module):
    """The frozen matrices of one kind of all experts, stacked by rows: `weight` (E * out, in), plain or in NF4. As a
    `weight` parameter it is found by code that looks for bitsandbytes' weights in a model."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.experts, self.rows, self.columns = weight.shape
        self.weight = nn.Parameter(weight.detach().flatten(0, 1), requires_grad=False)

    @property
    def frozen(self) -> FrozenStack:
        """The weights in the form that the kernels take, without a copy."""
        weight: Any = self.weight
        held = NF4Weight.from_bitsandbytes(weight) if getattr(weight, "quant_state", None) else weight.detach()
        return FrozenStack(held, self.experts)


class ExpertLayer(nn.Module):
    """The experts of one layer: `gate_up_proj` (E, 2 I, D) and `down_proj` (E, D, I)."""

    gate_up_proj: ExpertStack
    down_proj: ExpertStack

    def __init__(self, experts: Any) -> None:
        super().__init__()
        for name in STACKS:
            weight = getattr(experts, name)
            self.add_module(name, ExpertStack(weight))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return routed_experts(x, ids, weights, self.gate_up_proj.frozen, self.down_proj.frozen)


class RoutedBlock(nn.Module):
    """The MLP of a layer with experts: `gate`, transformers' router, and `experts`."""

    def __init__(self, block: Any, number: int) -> None:
        super().__init__()
        self.gate, self.experts, self.number = block.gate, ExpertLayer(block.experts), number
        self.choice: Choice | None = None  # None: use the router's ids
        self.train(block.training)

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids, weights = self.route(rows)
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        y: Tensor = self.experts(rows, ids, weights)
        return y.view(*hidden_states.shape[:-1], -1)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the expert ids (T, k) int64 of each row and the gate values (T, k) float32, which always come from the
        current router, even if the ids are replayed."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        probabilities = self.logits(rows).softmax(-1, dtype=wide)
        ids = self.chosen(probabilities)
        values = probabilities.gather(-1, ids)
        return ids, values / values.sum(-1, keepdim=True) if self.gate.norm_topk_prob else values

    def logits(self, rows: Tensor) -> Tensor:
        """Return the router's logits (T, E) in the dtype of the rows; other engines choose experts by the same."""
        return F.linear(rows, self.gate.weight)

    def chosen(self, probabilities: Tensor) -> Tensor:
        """Return the expert ids (T, k) to use: the router's top k, or `choice` applied to them if it is set."""
        ids = probabilities.detach().topk(self.gate.top_k, dim=-1).indices
        return ids if self.choice is None else self.choice(self.number, ids).to(ids.device, ids.dtype)


def routed_blocks(model: nn.Module) -> Iterator[RoutedBlock]:
    """Return an iterator over a model's routed blocks, in the order of its layers."""
    return (module for module in model.modules() if isinstance(module, RoutedBlock))


def expert_stacks(model: nn.Module) -> Iterator[ExpertStack]:
    """Return an iterator over the expert stacks of all blocks."""
    return (module for module in model.modules() if isinstance(module, ExpertStack))


def use_routed_blocks(model: Any) -> None:
    """Replace transformers' blocks by ours if the model's family is in our table. They hold the same weights, or stay
    on the meta device if the model is there."""
    row, count = family_of(model.config), 0
    for path, module in list(model.named_modules()):
        if row is not None and row.experts is not None and type(module).__name__ == row.experts.kind:
            model.set_submodule(path, RoutedBlock(module, count))
            count += 1


def use_brought_blocks(model: Any, quantized: bool) -> None:
    """Replace the blocks of a model that the caller loaded with transformers; ValueError if it is quantized except for
    its experts."""
    if quantized and has_experts(model.config) and not any(routed_blocks(model)):
        raise ValueError(BROUGHT)
    use_routed_blocks(model)


# Loading in NF4


@register_quantization_config(NAME)
class ExpertsNF4Config(BitsAndBytesConfig):
    """NF4 with double quantization for linear layers and for experts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.quant_method: Any = NAME


@register_quantizer(NAME)
class ExpertsNF4Quantizer(Bnb4BitHfQuantizer):
    """The quantizer that transformers calls while loading: bitsandbytes' for linear layers, ours for experts."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, device_map: Any = None,
                                             **kwargs: Any) -> None:
        """Put our blocks in place, on the meta device. ValueError if an expert's size is not a multiple of the scale
        block, or an expert is not in the checkpoint."""
        super()._process_model_before_weight_loading(model, device_map, **kwargs)
        use_routed_blocks(model)
        for stack in expert_stacks(model):
            check_blocks(stack)
        check_stored(model, kwargs.get("checkpoint_files"))

    def update_weight_conversions(self, weight_conversions: list[Any]) -> list[Any]:
        """Replace transformers' conversions for experts, which merge them into one 16-bit tensor, by ours."""
        kept = [conversion for conversion in weight_conversions if not (
            isinstance(conversion, WeightConverter) and "experts" in " ".join(conversion.target_patterns))]
        ours = [WeightConverter([f"mlp.experts.*.{part}.weight" for part in parts], f"mlp.experts.{name}.weight",
                                operations=[QuantizeExperts()]) for name, parts in STACKS.items()]
        return [*kept, *ours, *self.get_weight_conversions()]


def check_blocks(stack: ExpertStack) -> None:
    """Raise ValueError if a block of weights that share a scale would span two experts."""
    if stack.rows * stack.columns % BLOCK:
        raise ValueError(f"an expert's matrix is {stack.rows} x {stack.columns}, which does not end with a block of "
                         f"{BLOCK} weights: in 4 bits two experts would share a scale. Load the model with "
                         "load_in_4bit=False")


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
    """The conversion of the matrices of all experts of a layer to one stack in NF4."""

    def convert(self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str],
                **kwargs: Any) -> dict[str, Any]:
        """Return {parameter name: stack in NF4} from the tensors of all experts."""
        name = kwargs["full_layer_name"]
        experts = kwargs["model"].get_submodule(name.removesuffix(".weight")).experts
        return {name: quantized_stack([input_dict[pattern] for pattern in source_patterns], experts)}


def quantized_stack(parts: list[list[Tensor]], experts: int) -> Params4bit:
    """Return E matrices as one stack in NF4. Each matrix concatenates one tensor (n, in) of every part; the lists in
    `parts` are emptied on the way, to free memory."""
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
