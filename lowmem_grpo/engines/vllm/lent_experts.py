"""The trainer's experts and routers as another engine computes with them: on the same frozen tensors, by the same code.

The engine's own router chooses, from the logits of the trainer's, and the engine tells which experts each token took.
Logits are given in float32, as the trainer takes the softmax in float32 as well.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.engines.vllm.lent_layers import OTHER_ENGINE, BorrowError, same_tensors
from lowmem_grpo.memory.families import FAMILIES
from lowmem_grpo.models.experts import RoutedBlock

NO_ROUTES = "AuxOutput Connector"  # what vLLM names where it can return no routes


def no_experts(name: str) -> BorrowError:
    """For a mixture whose experts we do not lend."""
    lent = ", ".join(row.name for row in FAMILIES.values() if row.experts is not None)
    return BorrowError(f"{name} is a mixture of experts that is not shared with vLLM, which would allocate its experts "
                       f"a second time, in 16 bits; those of {lent} are shared. {OTHER_ENGINE}")


@dataclass
class BorrowedExperts:
    """The experts of one layer, and its router."""

    name: str  # the engine's name of the experts
    path: str  # of the trainer's block
    block: Any  # RoutedBlock
    held: list[Tensor] = field(init=False)  # holding what was borrowed keeps its addresses from being reused

    def __post_init__(self) -> None:
        self.held = self.tensors()

    @classmethod
    def of(cls, base: Any, prefix: str) -> "BorrowedExperts":
        """Those behind the engine's layer `prefix`; BorrowError where the trainer has no block of ours there."""
        path = prefix.rpartition(".")[0]
        try:
            block = base.get_submodule(path)
        except AttributeError:
            block = None
        if not isinstance(block, RoutedBlock):
            raise no_experts(f"{type(base).__name__} ({prefix})")
        return cls(prefix, path, block)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Experts, width, inner width, experts of a token."""
        (experts, width, inner), k = self.block.experts.down_proj.frozen.shape, self.block.gate.top_k
        return experts, width, inner, k

    def tensors(self) -> list[Tensor]:
        """Every tensor of the trainer that is read."""
        stacks = (self.block.experts.gate_up_proj.frozen, self.block.experts.down_proj.frozen)
        return [self.block.gate.weight.detach(), *(tensor for stack in stacks for tensor in stack.tensors)]

    def check(self) -> None:
        """Raise BorrowError if a tensor has been moved or replaced since."""
        same_tensors(self.name, self.held, self.tensors())

    @torch.no_grad()
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """(T, D), from x (T, D), and of each token the experts (T, k) and the values of their gates (T, k)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        found: Tensor = self.block.experts(x, ids, weights.to(wide))
        return found

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """(T, E) float32, of the router."""
        found: Tensor = self.block.logits(x).float()
        return found

    def close(self) -> None:
        """Release the trainer's tensors, even if somebody still holds this object."""
        self.block, self.held = None, []
