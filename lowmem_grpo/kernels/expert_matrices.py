"""The matrices of experts as a pass over them needs them: with biases, and with LoRA, of which each expert has its own.

    y_p = W_e x_p + bias_e + scale B_e A_e x_p        A_e = A[e r : (e + 1) r];  B_e = B.view(out, r, E)[:, :, e]

A (E r, in) and B (out, r E) have the layout of PEFT's `target_parameters`; r is the rank of an expert. Their gradients
are summed in float32 (float64 if x is), in tensors of the shapes of A and B: an expert that took no row gets zeros.

What LoRA takes, per matrix. One expert after the other: B once more in the dtype of x, as (E, out, r); per expert two
thin products in the forward pass and, recomputing it, up to seven in the backward pass, which holds dA, dB, and dB once
more at its end: 4 r E (in + 2 out) bytes. In the grouped form all adapters are applied to all rows, and what is not
chosen is left out: seven launches in the forward pass however many the experts, and numbers (S, E r) twice, S = T k.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import accumulator_dtype, addmm_fp32, check_numbers, check_tensors, matmul_fp32
from lowmem_grpo.kernels.frozen import FrozenStack
from lowmem_grpo.kernels.lora import pairs_of, scales_of, tensors_of
from lowmem_grpo.kernels.lora_factors import LoRA, shared_factors
from lowmem_grpo.kernels.thin_products import multiply


@dataclass(frozen=True, eq=False)
class Matrices:
    """One matrix (out, in) of each expert, with the biases and LoRA of all of them."""

    stack: FrozenStack
    bias: Tensor | None = None  # (E, out)
    lora: LoRA | None = None  # a (E r, in), b (out, r E)

    @property
    def parts(self) -> tuple[Any, ...]:
        """What operations take: kind, tensors and sizes of the stack, [bias, a, b] and the scale of LoRA."""
        return *self.stack.parts, [self.bias, *tensors_of([self.lora])], *scales_of([self.lora])

    @classmethod
    def from_parts(
        cls, dtype: torch.dtype, kind: str, tensors: Sequence[Tensor], sizes: Sequence[int],
        added: Sequence[Tensor | None], scale: float,
    ) -> "Matrices":
        return cls(FrozenStack.from_parts(kind, tensors, sizes, dtype), added[0], *pairs_of(added[1:], [scale]))

    def grouped(self, x: Tensor, ids: Tensor, places: Any) -> Tensor:
        """Return y (S, out) at places whose experts are ids (S,), through the grouped kernels, for x (S / k, in)."""
        y: Tensor = self.stack.weight.grouped(x, self.stack.experts, places, len(ids) // len(x))
        if self.bias is not None:
            y += self.bias[ids]
        if self.lora is not None:
            y.addmm_(self.low(x, ids).mT.flatten(1), self.lora.b.T, alpha=self.lora.scale)
        return y

    def grouped_back(self, grad: Tensor, ids: Tensor, places: Any) -> tuple[Tensor, Tensor | None]:
        """Return dy W + d_low A (S, in) and d_low / scale (S, E, r), if there is LoRA, for dy (S / k, out)."""
        experts = self.stack.experts
        back: Tensor = self.stack.weight.grouped(grad, experts, places, len(ids) // len(grad), back=True)
        if self.lora is None:
            return back, None
        d_low = at_places((grad @ self.lora.b).view(len(grad), -1, experts).mT, ids)
        return back.addmm_(d_low.flatten(1), self.lora.a, alpha=self.lora.scale), d_low

    def grouped_gradients(
        self, grad: Tensor, d_low: Tensor | None, x: Tensor, ids: Tensor, factor: Tensor | None = None
    ) -> list[Tensor]:
        """Return dA and dB, if there is LoRA; dy at a place is `grad` times `factor` (S, 1)."""
        if self.lora is None or d_low is None:
            return []
        low, scale = self.low(x, ids), self.lora.scale
        for part in (low, d_low):
            part.mul_(scale if factor is None else scale * factor[..., None])
        d_low, low = (part.flatten(1).view(len(rows), -1, len(self.lora.a)).sum(1)
                      for part, rows in ((d_low, x), (low.mT, grad)))
        return [matmul_fp32(d_low.T, x), matmul_fp32(grad.T, low)]

    def low(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return A x (S, E, r) at places whose experts are ids (S,), for x (S / k, in)."""
        assert self.lora is not None
        return at_places((x @ self.lora.a.T).view(len(x), self.stack.experts, -1), ids)


def at_places(values: Tensor, ids: Tensor) -> Tensor:
    """Return values (N, E, r) at the k places of each row (N k, E, r), with 0 for all experts but ids (N k,)."""
    chosen = ids.view(len(values), -1, 1) == torch.arange(values.shape[1], device=ids.device)
    return values[:, None].where(chosen[..., None], 0).flatten(0, 1)


class OneByOne:
    """Applies the matrices of one expert at a time, and with `trained` sums the gradients of LoRA."""

    def __init__(self, matrices: Matrices, trained: bool = False) -> None:
        self.bias, self.pair, self.sums, lora, experts = matrices.bias, None, [], matrices.lora, matrices.stack.experts
        if lora is not None:
            b = lora.b.view(len(lora.b), -1, experts).permute(2, 0, 1).contiguous()  # (E, out, r)
            self.pair = LoRA(lora.a.view(experts, -1, lora.a.shape[1]), b, lora.scale)
            kind = accumulator_dtype(b.dtype)
            self.sums = [torch.zeros_like(part, dtype=kind) for part in (self.pair.a, b) if trained]

    def project(self, x: Tensor, weight: Tensor, expert: int) -> Tensor:
        """Return y (n, out) for x (n, in) and the expert's weight (out, in)."""
        y = torch.nn.functional.linear(x, weight, None if self.bias is None else self.bias[expert])
        if self.pair is not None:
            y.addmm_(x @ self.pair.a[expert].T, self.pair.b[expert].T, alpha=self.pair.scale)
        return y

    def back(self, grad: Tensor, weight: Tensor, expert: int) -> tuple[Tensor, Tensor | None]:
        """Return dy W + d_low A (n, in), and d_low (n, r), if there is LoRA, for dy (n, out)."""
        back = grad @ weight
        if self.pair is None:
            return back, None
        d_low = product(grad, self.pair.b[expert], self.pair.scale)
        return back.addmm_(d_low, self.pair.a[expert]), d_low

    def dot(self, grad: Tensor, terms: Tensor, expert: int) -> Tensor:
        """Return dy y (n,): the sum of `terms` (n, in), the products of x and its gradient, and that of the bias."""
        total = terms.sum(1)
        return total if self.bias is None else total.addmv_(grad.to(total.dtype), self.bias[expert].to(total.dtype))

    def collect(
        self, grad: Tensor, d_low: Tensor | None, x: Tensor, expert: int, factor: Tensor | None = None
    ) -> None:
        """Add dA_e = d_low^T x and dB_e = dy^T low, if there is LoRA; dy is `grad` (n, out) times `factor` (n, 1)."""
        if self.pair is None or d_low is None:
            return
        low = product(x, self.pair.a[expert].T, self.pair.scale)
        if factor is not None:
            d_low, low = d_low.mul_(factor), low.mul_(factor)
        addmm_fp32(self.sums[0][expert], d_low.T, x)
        addmm_fp32(self.sums[1][expert], grad.T, low)

    def gradients(self) -> list[Tensor]:
        """Return dA (E r, in) and dB (out, r E), if there is LoRA."""
        return [self.sums[0].flatten(0, 1), self.sums[1].permute(1, 2, 0).flatten(1)] if self.sums else []


def product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale left right, rounded once."""
    out = left.new_empty(len(left), right.shape[1])
    multiply([(out, left, right, scale)])
    return out


def in_dtype_of(
    x: Tensor, matrices: tuple[Matrices, Matrices], loras: Sequence[LoRA | None],
    find: Callable[..., Any] = shared_factors,
) -> tuple[Matrices, Matrices]:
    """Return the matrices with biases and these LoRA pairs in the dtype of x."""
    factors = find([[lora] for lora in loras], x.dtype)
    gate_up, down = (Matrices(one.stack, None if one.bias is None else one.bias.to(x.dtype),
                              None if pair is None else LoRA(pair.a, pair.b[0], pair.scales[0]))
                     for one, pair in zip(matrices, factors, strict=True))
    return gate_up, down


def check_added(name: str, matrices: Matrices) -> None:
    """Raise ValueError for biases or LoRA that do not fit the experts' matrices."""
    (experts, rows, columns), bias, lora = matrices.stack.shape, matrices.bias, matrices.lora
    check_tensors({f"{name}_bias": bias})
    if bias is not None and (bias.shape != (experts, rows) or not bias.is_floating_point()):
        raise ValueError(f"expected {name}_bias ({experts}, {rows}) of a floating dtype; got {tuple(bias.shape)} "
                         f"{bias.dtype}")
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"the biases of experts are frozen: call {name}_bias.requires_grad_(False) and train LoRA")
    if lora is None:
        return
    if not isinstance(lora, LoRA):
        raise ValueError(f"expected {name}_lora as LoRA(a, b, scale); got a {type(lora).__name__}")
    check_tensors(a=lora.a, b=lora.b)
    check_numbers(scale=lora.scale)
    rank = lora.a.shape[0]
    if lora.a.shape != (rank, columns) or lora.b.shape != (rows, rank) or rank % experts or not rank:
        raise ValueError(f"expected {name}_lora with a ({experts} r, {columns}) and b ({rows}, r {experts}) for "
                         f"{experts} experts; got {tuple(lora.a.shape)}, {tuple(lora.b.shape)}")
