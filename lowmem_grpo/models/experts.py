"""A block of routed experts that runs our operation and replaces transformers' block while a model is loaded.

It keeps transformers' router, frozen but not detached: gradients reach the hidden states through the gates. Gates are
computed and renormalised in float32, and not rounded to 16 bits as in transformers, so that trainer and engines
multiply by the same numbers. `RoutedBlock.chosen` is where routes are recorded and replayed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_grpo.kernels.frozen import FrozenStack
from lowmem_grpo.kernels.frozen_weight import frozen_weight
from lowmem_grpo.kernels.routed_experts import routed_experts
from lowmem_grpo.memory.families import family_of

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
        self.training = block.training
        self.experts.train(self.training)

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids, weights = self.route(rows)
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        y: Tensor = self.experts(rows, ids, weights)
        return y.view(*hidden_states.shape[:-1], -1)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return expert ids (T, k) int64, and their gates (T, k) float32 by the live router, also for replayed ids."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        probabilities = self.logits(rows).softmax(-1, dtype=wide)
        ids = self.chosen(probabilities)
        values = probabilities.gather(-1, ids)
        return ids, values / values.sum(-1, keepdim=True) if self.gate.norm_topk_prob else values

    def logits(self, rows: Tensor) -> Tensor:
        """Return the router's logits (T, E) in the dtype of `rows` (T, D), as sampling engines do."""
        return F.linear(rows, self.gate.weight)

    def chosen(self, probabilities: Tensor) -> Tensor:
        """Return the router's top k expert ids (T, k), or the ids that `choice` returns for them."""
        ids = probabilities.detach().topk(self.gate.top_k, dim=-1).indices
        return ids if self.choice is None else self.choice(self.number, ids).to(ids.device, ids.dtype)


def routed_blocks(model: nn.Module) -> Iterator[RoutedBlock]:
    """Return an iterator over a model's routed blocks, in the order of its layers."""
    return (module for module in model.modules() if isinstance(module, RoutedBlock))


def expert_stacks(model: nn.Module) -> Iterator[ExpertStack]:
    return (module for module in model.modules() if isinstance(module, ExpertStack))


def use_routed_blocks(model: Any) -> None:
    """Replace transformers' blocks by ours, with the same weights, for a family with experts in memory/families.py."""
    row, count = family_of(model.config), 0
    for path, module in list(model.named_modules()):
        if row is not None and row.experts is not None and type(module).__name__ == row.experts.kind:
            model.set_submodule(path, RoutedBlock(module, count))
            count += 1
