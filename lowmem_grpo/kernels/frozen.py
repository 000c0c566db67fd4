"""A linear layer on a frozen weight of any kind, and the frozen weights of experts in one buffer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import check_tensors, once_differentiable
from lowmem_grpo.kernels.frozen_weight import KINDS, FrozenWeight, PlainWeight, check_frozen, frozen_weight


def frozen_linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias (..., out) for x (..., in) of any floating dtype and a weight as in `lora_linear`. Codes are
    decoded to the dtype of x, and again in the backward pass, for which nothing is saved. A bias may get a gradient,
    the weight none. ValueError if shapes do not fit."""
    weight = frozen_weight(weight)
    check_tensors({"bias": bias}, x=x)
    check_frozen(weight)
    shapes = x.shape[-1:], tuple(weight.shape), None if bias is None else tuple(bias.shape)
    if shapes[0] != weight.shape[1:] or shapes[2] not in (None, shapes[1][:1]) or not x.is_floating_point():
        raise ValueError("expected x (..., in) of a floating dtype, weight (out, in), bias (out,); got "
                         f"{tuple(x.shape)} {x.dtype}, {shapes[1:]}")
    return FrozenLinearFunction.apply(x, weight, bias)


class FrozenLinearFunction(torch.autograd.Function):
    """dx = dy W;  dbias = sum of dy over rows."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.weight = weight
        with torch.autocast(x.device.type, enabled=False):
            return weight.project(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        needs_x, _, needs_bias = ctx.needs_input_grad
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if needs_bias else None
        grad_x = ctx.weight.project_back([grad.reshape(-1, grad.shape[-1])]) if needs_x else None
        return None if grad_x is None else grad_x.view(*grad.shape[:-1], grad_x.shape[1]), None, grad_bias


@dataclass(frozen=True, eq=False)
class FrozenStack:
    """The frozen weights of E experts in one buffer: E matrices (out, in) on top of each other. ValueError if E does
    not divide the rows, or if a block of quantized weights belongs to two experts."""

    weight: FrozenWeight  # (E * out, in)
    experts: int  # E

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", frozen_weight(self.weight))
        if len(self.weight.shape) != 2 or self.experts < 1 or self.weight.shape[0] % self.experts:
            raise ValueError(f"expected a weight (E * out, in) of E = {self.experts} experts; got shape "
                             f"{tuple(self.weight.shape)}")
        _, rows, columns = self.shape
        if rows % self.weight.row_unit:
            raise ValueError(f"an expert of {rows} x {columns} weights does not end where a block of weights in "
                             f"{self.weight.kind} ends, so that its neighbour would share a scale with it. Hold such "
                             "experts in 16 bits")

    @classmethod
    def from_weights(cls, weights: Tensor) -> "FrozenStack":
        """Borrow weights (E, out, in) of a floating dtype; ValueError unless they are contiguous."""
        if weights.ndim != 3 or not weights.is_contiguous():
            raise ValueError(f"expected contiguous weights (E, out, in); got {tuple(weights.shape)}, strides "
                             f"{weights.stride()}")
        return cls(PlainWeight(weights.detach().flatten(0, 1)), weights.shape[0])

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.experts, self.weight.shape[0] // self.experts, self.weight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def parts(self) -> tuple[str, list[Tensor], list[int]]:
        """The stack as operations take it: its kind, tensors and sizes."""
        return self.weight.kind, self.weight.tensors, [self.experts, self.weight.shape[0], *self.weight.sizes]

    @classmethod
    def from_parts(
        cls, kind: str, tensors: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype
    ) -> "FrozenStack":
        experts, rows, *others = sizes
        return cls(KINDS[kind].from_parts(tensors, others, [rows], dtype), experts)

    def expert(self, number: int) -> FrozenWeight:
        """Return the weight (out, in) of one expert, without a copy."""
        rows = self.shape[1]
        return self.weight.rows(number * rows, (number + 1) * rows)
