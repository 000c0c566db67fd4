"""A block of routed experts that runs our operation and replaces transformers' block while a model is loaded.

It keeps transformers' router, frozen but not detached: gradients reach the hidden states through the gates. Gates are
computed and renormalised in float32, and not rounded to 16 bits as in transformers, so that trainer and engines
multiply by the same numbers. `RoutedBlock.chosen` is where routes are recorded and replayed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_grpo.kernels.clamped_swiglu import ClampedSwiGLU
from lowmem_grpo.kernels.frozen import FrozenStack
from lowmem_grpo.kernels.frozen_weight import frozen_weight, kept_weight
from lowmem_grpo.kernels.lora_factors import LoRA
from lowmem_grpo.kernels.mxfp4 import MXFP4Weight
from lowmem_grpo.kernels.routed_experts import routed_experts
from lowmem_grpo.memory.families import ExpertBlock, family_of
from lowmem_grpo.memory.layer_forms import MXFP4

Choice = Callable[[int, Tensor], Tensor]  # (index of the block, ids that its router chose) -> ids to use
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # matrices joined in each stack
BROUGHT = ("the model is a mixture of experts whose linear layers are in 4 bits, and its experts are not: they would "
           "stay in 16 bits, which is nearly all of it. Load it with FastLanguageModel.from_pretrained(name, "
           "load_in_4bit=True)")


class ExpertStack(nn.Module):
    """One kind of frozen matrix of all experts, stacked by rows: `weight` (E * out, in), plain or in NF4."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.experts, self.rows, self.columns = weight.shape
        self.weight = nn.Parameter(weight.detach().flatten(0, 1), requires_grad=False)

    @property
    def frozen(self) -> FrozenStack:
        """The weights in the form that the kernels take, without a copy."""
        return FrozenStack(frozen_weight(self.weight), self.experts)

    @property
    def lora(self) -> LoRA | None:
        """The LoRA on these weights, of which a stack by itself has none."""
        return None


class PackedStack(ExpertStack):
    """A stack in MXFP4, as it is stored: `blocks` (E, out, in / 32, 16) and `scales` (E, out, in / 32), uint8."""

    kind = MXFP4  # of its weights
    blocks: nn.Parameter
    scales: nn.Parameter
    compute_dtype: torch.dtype

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.experts, self.rows, self.columns = shape
        self.compute_dtype = dtype
        for name, sizes in (("blocks", (16,)), ("scales", ())):
            bits = torch.empty(self.experts, self.rows, self.columns // 32, *sizes, dtype=torch.uint8)
            self.register_parameter(name, nn.Parameter(bits, requires_grad=False))

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]  # whoever asks for the device or the bytes
        return self.blocks

    @property
    def frozen(self) -> FrozenStack:
        parts = self.blocks, self.scales, self.compute_dtype
        whole = kept_weight(self, parts, lambda: MXFP4Weight.from_parts(
            [self.blocks.detach().view(-1, self.columns // 2), self.scales.detach().flatten(0, 1)], [],
            [self.experts * self.rows], self.compute_dtype))
        return FrozenStack(whole, self.experts)

    def check(self) -> None:
        """Raise ValueError for blocks of another shape, and for a scale that is NaN."""
        wanted = self.experts, self.rows, self.columns // 32
        if (got := tuple(self.blocks.shape)) != (*wanted, 16) or tuple(self.scales.shape) != wanted:
            raise ValueError(f"its blocks and scales are {got} and {tuple(self.scales.shape)}, where its config has "
                             f"{(*wanted, 16)} and {wanted}")
        MXFP4Weight.from_codes(self.blocks.detach().flatten(0, 1), self.scales.detach().flatten(0, 1),
                               self.compute_dtype)


class ExpertLayer(nn.Module):
    """The experts of one layer: `gate_up_proj` (E, 2 I, D) and `down_proj` (E, D, I), gpt-oss's with biases."""

    gate_up_proj: ExpertStack
    down_proj: ExpertStack

    def __init__(self, experts: Any, make: Callable[[Tensor], ExpertStack] = ExpertStack) -> None:
        """Take over transformers' experts; `make` returns the stack of a weight (E, out, in)."""
        super().__init__()
        self.options: dict[str, Any] = {}
        if hasattr(experts, "alpha"):
            self.options["activation"] = ClampedSwiGLU(experts.alpha, experts.limit)
        for name in STACKS:
            weight = getattr(experts, name)
            self.add_module(name, make(weight.mT if getattr(experts, "is_transposed", False) else weight))
            if (bias := getattr(experts, f"{name}_bias", None)) is not None:
                self.register_parameter(f"{name}_bias", bias.requires_grad_(False))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        stacks, options = [getattr(self, name) for name in STACKS], dict(self.options)
        for name, stack in zip(("gate_up", "down"), stacks, strict=True):
            if (bias := getattr(self, f"{name}_proj_bias", None)) is not None:
                options[f"{name}_bias"] = bias
            if (lora := stack.lora) is not None:
                options[f"{name}_lora"] = lora
        return routed_experts(x, ids, weights, stacks[0].frozen, stacks[1].frozen, **options)


class RoutedBlock(nn.Module):
    """The MLP of a layer with experts: transformers' router, under its own name, and `experts`."""

    def __init__(self, block: Any, number: int, form: ExpertBlock,
                 make: Callable[[Tensor], ExpertStack] = ExpertStack) -> None:
        super().__init__()
        self.form, self.number = form, number
        self.add_module(form.router, getattr(block, form.router))
        self.experts = ExpertLayer(block.experts, make)
        self.choice: Choice | None = None  # None: use the router's ids
        self.training = block.training
        self.experts.train(self.training)

    @property
    def chooser(self) -> Any:
        """The router."""
        return self.get_submodule(self.form.router)

    def forward(self, hidden_states: Tensor) -> Any:
        """Return the block's output, in the shape of `hidden_states`; with the gates where transformers' block does."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids, weights = self.route(rows)
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        y: Tensor = self.experts(rows, ids, weights)
        y = y.view(*hidden_states.shape[:-1], -1)
        return (y, weights) if self.form.pair else y

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return expert ids (T, k) int64, and their gates (T, k) float32 by the live router, also for replayed ids."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        probabilities = self.logits(rows).softmax(-1, dtype=wide)
        ids = self.chosen(probabilities)
        values = probabilities.gather(-1, ids)
        renormalised = getattr(self.chooser, "norm_topk_prob", True)
        return ids, values / values.sum(-1, keepdim=True) if renormalised else values

    def logits(self, rows: Tensor) -> Tensor:
        """Return the router's logits (T, E) in the dtype of `rows` (T, D), as sampling engines do."""
        return F.linear(rows, self.chooser.weight, getattr(self.chooser, "bias", None))

    def chosen(self, probabilities: Tensor) -> Tensor:
        """Return the router's top k expert ids (T, k), or the ids that `choice` returns for them."""
        ids = probabilities.detach().topk(self.chooser.top_k, dim=-1).indices
        return ids if self.choice is None else self.choice(self.number, ids).to(ids.device, ids.dtype)


def routed_blocks(model: nn.Module) -> Iterator[RoutedBlock]:
    """Return an iterator over a model's routed blocks, in the order of its layers."""
    return (module for module in model.modules() if isinstance(module, RoutedBlock))


def expert_stacks(model: nn.Module) -> Iterator[ExpertStack]:
    return (module for module in model.modules() if isinstance(module, ExpertStack))


def packed_stacks(model: nn.Module) -> Iterator[PackedStack]:
    return (module for module in model.modules() if isinstance(module, PackedStack))


def use_routed_blocks(model: Any, make: Callable[[Tensor], ExpertStack] = ExpertStack) -> None:
    """Replace transformers' blocks by ours, with the same weights, for a family with experts in memory/families.py.
    `make` returns the stack of a weight (E, out, in)."""
    row, count = family_of(model.config), 0
    for path, module in list(model.named_modules()):
        if row is not None and row.experts is not None and type(module).__name__ == row.experts.kind:
            model.set_submodule(path, RoutedBlock(module, count, row.experts, make))
            count += 1
