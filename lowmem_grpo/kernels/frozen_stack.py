"""The frozen weights of E experts in one buffer, E matrices (out, in) on top of each other, in NF4 or unquantized:
expert e is rows e * out to (e + 1) * out.

An expert is a view of codes and scales, so a block of 64 weights must end at each border between experts. Blocks of
nested scales may span a border; `NF4Weight.rows` takes account of that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem_grpo.kernels.nf4 import NF4Weight


@dataclass(frozen=True, eq=False)
class FrozenStack:
    """Frozen weights (E, out, in) of E experts; ValueError if they cannot be sliced by expert."""

    weight: Tensor | NF4Weight  # (E * out, in)
    experts: int  # E

    def __post_init__(self) -> None:
        if len(self.weight.shape) != 2 or self.experts < 1 or self.weight.shape[0] % self.experts:
            raise ValueError(f"expected a weight (E * out, in) of E = {self.experts} experts; got shape "
                             f"{tuple(self.weight.shape)}")
        _, rows, columns = self.shape
        if isinstance(self.weight, NF4Weight) and rows * columns % self.weight.blocksize:
            raise ValueError(f"an expert of {rows} x {columns} weights does not end where a block of "
                             f"{self.weight.blocksize} ends, so that its neighbour would share a scale with it. Hold "
                             "such experts in 16 bits")

    @classmethod
    def from_weights(cls, weights: Tensor) -> "FrozenStack":
        """Borrow weights (E, out, in) of a floating dtype; ValueError unless they are contiguous."""
        if weights.ndim != 3 or not weights.is_contiguous():
            raise ValueError(f"expected contiguous weights (E, out, in); got {tuple(weights.shape)}, strides "
                             f"{weights.stride()}")
        return cls(weights.detach().flatten(0, 1), weights.shape[0])

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.experts, self.weight.shape[0] // self.experts, self.weight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the operations take: the weights, or codes, scales, their values, nested scales."""
        return [self.weight] if isinstance(self.weight, Tensor) else self.weight.tensors

    @property
    def sizes(self) -> list[int]:
        """[E, E * out], followed by the sizes of an NF4 weight, as the operations take them."""
        nf4 = () if isinstance(self.weight, Tensor) else self.weight.sizes
        return [self.experts, self.weight.shape[0], *nf4]

    @classmethod
    def from_parts(cls, tensors: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype) -> "FrozenStack":
        """Return the stack with these `tensors` and `sizes`."""
        experts, rows, *others = sizes
        if not others:
            return cls(tensors[0], experts)
        return cls(NF4Weight.from_parts(tensors, others, [rows], dtype), experts)

    def expert(self, number: int) -> Tensor | NF4Weight:
        """Return the weight (out, in) of one expert, a view."""
        rows = self.shape[1]
        part = slice(number * rows, (number + 1) * rows)
        return self.weight[part] if isinstance(self.weight, Tensor) else self.weight.rows(part.start, part.stop)

    def fill(self, out: Tensor, number: int) -> Tensor:
        """Return an expert's weight (out, in) in the dtype of `out`: a view if it has it, else written to `out`."""
        part = self.expert(number)
        if isinstance(part, Tensor):
            return part if part.dtype == out.dtype else out.copy_(part)
        part.fill(out)
        return out
