"""The trainer's linear layers, experts and routers as vLLM's layers compute with them, on the same frozen tensors.

An engine's layer may correspond to several modules of the trainer (qkv_proj to q_proj, k_proj, v_proj): its output is
their concatenation, with LoRA and biases, in one product if their weights are adjacent in memory. Everything goes
through one opaque custom op, which the engine's compiler does not trace. A CUDA graph freezes addresses and Python's
control flow, so the op never branches on the adapter: the same tensors hold the adapter's values, or zeros.

In a mixture of experts, the engine selects experts from the trainer's float32 router logits, and returns the choices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_grpo.kernels.custom_op import custom_op
from lowmem_grpo.kernels.frozen_weight import FrozenWeight, PlainWeight, can_decode, decode
from lowmem_grpo.kernels.lora import LoRA
from lowmem_grpo.kernels.lora_up import ONE_PRODUCT, lora_up
from lowmem_grpo.kernels.nf4 import NF4Weight
from lowmem_grpo.kernels.nf4_linear import nf4_linear
from lowmem_grpo.memory.families import family_of, has_experts
from lowmem_grpo.models.fused_weights import joined, joined_weights
from lowmem_grpo.models.lora_layers import base_of, held_weight

LAYERS: dict[str, "BorrowedLinear"] = {}  # the custom op's layers by name, while an engine is open
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ADVICE = "Close the engine before moving, merging, quantizing or reloading the model, and make a new one"
OTHER_ENGINE = 'Sample with fast_inference="transformers"'


class BorrowError(ValueError):
    """The trainer's model does not map onto the engine's, or no longer does."""


def check_family(config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Raise BorrowError for a model family without a vLLM class, and if that class cannot compute here."""
    family = family_of(config)
    if has_experts(config) and (family is None or family.experts is None):
        raise BorrowError(f"experts of {getattr(config, 'model_type', 'this model')} are not shared with vLLM, which "
                          f"would allocate them a second time, in 16 bits. {OTHER_ENGINE}")
    if family is not None and family.vllm is None:
        raise BorrowError(f"this vLLM has no {family.name} of its own, only transformers' model in its place. "
                          f"{OTHER_ENGINE}")
    if family is None or not family.delta_net:
        return
    if find_spec("torchvision") is None:
        raise BorrowError(f"vLLM's class for {family.name} imports torchvision, which is not installed. "
                          f"{OTHER_ENGINE}, or install torchvision")
    if device.type == "cpu" and dtype != torch.bfloat16:
        raise BorrowError(f"vLLM's gated delta nets for CPUs compute in bfloat16, and {family.name} is here in "
                          f"{str(dtype).removeprefix('torch.')}. {OTHER_ENGINE}, or load it with dtype=torch.bfloat16")


class Product:
    """One matrix, or several that are adjacent in memory: x (N, in) -> (N, sum of out), with biases and LoRA.

    For few rows on a card, a quantized weight takes two kernel launches if all its matrices have LoRA of the same rank
    and scale. `wide` may hold the dequantized weight and, below it, all A, for inputs of more than `few` rows: one
    product then yields x W^T and x A^T.
    """

    def __init__(self, weight: FrozenWeight, features: list[int], biases: list[Tensor | None], loras: list[LoRA | None],
                 dtype: torch.dtype) -> None:
        self.weight, self.loras = weight, loras
        self.wide: Tensor | None = None
        self.few = 0  # up to this many rows the codes are used; safe in CUDA graphs, which have a fixed number of rows
        self.features = features
        self.bias = joined_bias(biases, features, dtype)
        present = [lora for lora in loras if lora is not None]
        self.stack_a = joined([lora.a for lora in present]) if present else None
        self.stack_b = joined([lora.b for lora in present]) if present else None
        self.factors = [None if lora is None else lora.b for lora in loras]
        self.scales = [1.0 if lora is None else lora.scale for lora in loras]
        extra = rows_of_a(present)
        self.rows = weight.shape[0] + extra  # of `wide`
        self.wide_bias = None if self.bias is None else nn.functional.pad(self.bias, (0, extra))
        one_kind = len(present) == len(loras) and len({(lora.a.shape[0], lora.scale) for lora in present}) == 1
        self.one_kernel = one_kind and weight.quantized

    def forward(self, x: Tensor) -> Tensor:
        """Map x (N, in) to contiguous (N, out), with biases and adapters."""
        wide = None if x.shape[0] <= self.few else self.wide
        if self.one_kernel and wide is None:
            if isinstance(self.weight, NF4Weight):  # with many rows too, in another order than below
                return nf4_linear(x, self.weight, self.stack_a, self.stack_b, self.scales[0], self.bias)
            if self.stack_a is not None and can_decode(x, self.weight):
                return decode(x, self.weight, x @ self.stack_a.T, self.stack_b, self.scales[0], self.bias)
        size = self.weight.shape[0]
        if wide is not None and self.stack_a is not None and x.shape[0] <= ONE_PRODUCT:
            *parts, low = PlainWeight(wide).project(x, self.wide_bias).split([*self.features, self.rows - size], 1)
            y = x.new_empty(len(x), size)
            lora_up(y.split(self.features, 1), parts, low, self.factors, self.scales)
            return y
        y = (self.weight if wide is None else PlainWeight(wide[:size])).project(x, self.bias)
        if self.stack_a is not None:
            outputs = y.split(self.features, 1)
            lora_up(outputs, outputs, x @ self.stack_a.T, self.factors, self.scales)
        return y


def rows_of_a(loras: Sequence[LoRA]) -> int:
    """Return the rows of `Product.wide` for A, with unused ones, so that rows of a product begin at multiples of 16
    bytes."""
    return sum(-(-lora.a.shape[0] // 8) * 8 for lora in loras)


def joined_bias(biases: list[Tensor | None], features: list[int], dtype: torch.dtype) -> Tensor | None:
    """Return the joined bias (sum of out,) in `dtype`, with zeros for matrices without one; None if none has one. It is
    a view if the trainer's biases are adjacent in memory, else a copy, which stays valid because biases are frozen."""
    present = [bias.detach() for bias in biases if bias is not None]
    if not present:
        return None
    whole = joined(present) if len(present) == len(biases) else None
    if whole is not None and whole.dtype == dtype:
        return whole
    return torch.cat([present[0].new_zeros(size, dtype=dtype) if bias is None else bias.detach().to(dtype)
                      for bias, size in zip(biases, features, strict=True)])


class Borrowed:
    """Frozen tensors of the trainer behind one engine layer. Holding them keeps their addresses from being reused."""

    name: str  # the engine's name of the layer
    held: list[Tensor]

    def tensors(self) -> list[Tensor]:
        """Return every tensor of the trainer that the layer reads now, except adapters."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise BorrowError if a tensor has been moved or replaced since the engine started."""
        same_tensors(self.name, self.held, self.tensors())


@dataclass
class BorrowedLinear(Borrowed):
    """The trainer's linear modules (plain or quantized) behind one engine layer, with the engine's LoRA tensors."""

    name: str
    modules: dict[str, nn.Module]  # the trainer's modules by path
    loras: list[LoRA | None]  # in `dtype`; all A factors are adjacent in memory, and so are all B factors
    dtype: torch.dtype  # the engine's compute dtype
    twice: bool = False  # the last module's output is used twice, as keys and as values

    def __post_init__(self) -> None:
        weights = [weight_of(path, module) for path, module in self.modules.items()]
        self.shapes, features = [weight.shape for weight in weights], [weight.shape[0] for weight in weights]
        biases = [base_of(module).bias for module in self.modules.values()]
        whole = joined_weights(weights) if len(weights) > 1 else None
        parts = zip(weights, features, biases, self.loras, strict=True)
        self.products = [Product(weight, [size], [bias], [lora], self.dtype) for weight, size, bias, lora in parts] \
            if whole is None else [Product(whole, features, biases, self.loras, self.dtype)]
        self.held = [tensor.detach() for tensor in self.tensors()]
        LAYERS[self.name] = self

    @property
    def out_features(self) -> int:
        """The width of the output. If a layer uses its keys as the values too, the last matrix counts twice."""
        return sum(shape[0] for shape in self.shapes) + (self.shapes[-1][0] if self.twice else 0)

    def tensors(self) -> list[Tensor]:
        tensors = []
        for path, module in self.modules.items():
            weight, bias = weight_of(path, module), base_of(module).bias
            tensors += weight.tensors
            tensors += [] if bias is None else [bias]
        return tensors

    def check(self) -> None:
        if any(getattr(module, "merged", False) for module in self.modules.values()):
            raise BorrowError(f"{self.name}: the adapter was merged into the weights while an engine samples with "
                              f"them. {ADVICE}")
        super().check()

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in) to (N, sum of out)."""
        outputs = [product.forward(x) for product in self.products]
        if self.twice:
            outputs.append(outputs[-1][:, -self.shapes[-1][0] :])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def close(self) -> None:
        if LAYERS.get(self.name) is self:
            del LAYERS[self.name]
        self.modules, self.loras, self.products, self.held = {}, [], [], []


class BorrowedExperts(Borrowed):
    """The trainer's experts and router of one layer (`block`, a RoutedBlock)."""

    def __init__(self, name: str, block: Any) -> None:
        self.name, self.block = name, block
        self.held = self.tensors()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(experts, width, inner width, experts per token)."""
        (experts, width, inner), k = self.block.experts.down_proj.frozen.shape, self.block.gate.top_k
        return experts, width, inner, k

    def tensors(self) -> list[Tensor]:
        stacks = (self.block.experts.gate_up_proj.frozen, self.block.experts.down_proj.frozen)
        return [self.block.gate.weight.detach(), *(tensor for stack in stacks for tensor in stack.weight.tensors)]

    @torch.no_grad()
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the output (T, D) for x (T, D), the chosen experts `ids` (T, k) and their gate `weights` (T, k)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        y: Tensor = self.block.experts(x, ids, weights.to(wide))
        return y

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Return the router's logits (T, E) float32."""
        logits: Tensor = self.block.logits(x).float()
        return logits

    def close(self) -> None:
        self.block, self.held = None, []


def weight_of(path: str, module: Any) -> FrozenWeight:
    """Return the frozen weight of a linear module; BorrowError if its type or dtype is not supported."""
    base = base_of(module)
    if not isinstance(base, nn.Linear):
        raise BorrowError(f"{path} is a {type(base).__name__}; expected a torch.nn.Linear or one of bitsandbytes. "
                          f"{OTHER_ENGINE}")
    try:
        weight = held_weight(base)
    except ValueError as error:
        raise BorrowError(f"{path}: {error}. {ADVICE}") from error
    if weight.dtype not in DTYPES:
        raise BorrowError(f"{path} has weights of {weight.dtype}; expected one of {DTYPES}, 4 bits of bitsandbytes or "
                          f"FP8. {OTHER_ENGINE}")
    return weight


def same_tensors(name: str, held: Sequence[Tensor], now: Sequence[Tensor]) -> None:
    """Raise BorrowError if the tensors `now` differ from those `held` in address, shape or dtype."""
    places = [[(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors] for tensors in (held, now)]
    if places[0] != places[1]:
        raise BorrowError(
            f"{name}: the trainer's tensors were moved or replaced while an engine samples with them. {ADVICE}"
        )


def linear_by_name(x: Tensor, out_features: int, layer: str) -> Tensor:
    """Compute the engine layer of that name on x (..., in). This is the body of the custom op."""
    with torch.no_grad():
        return LAYERS[layer].forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], out_features)


borrowed_linear = custom_op(
    "borrowed_linear", linear_by_name, fake=lambda x, out_features, _: x.new_empty(*x.shape[:-1], out_features)
)
