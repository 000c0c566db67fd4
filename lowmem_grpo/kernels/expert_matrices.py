"""The matrices of experts as a pass over them needs them: with biases, and with LoRA, of which each expert has its own.

    y_p = W_e x_p + bias_e + scale B_e A_e x_p        A_e = A[e r : (e + 1) r];  B_e = B.view(out, r, E)[:, :, e]

A (E r, in) and B (out, r E) have the layout of PEFT's `target_parameters`; r is the rank of an expert. Their gradients
are summed in float32 (float64 if x is), in tensors of the shapes of A and B: an expert that took no row gets zeros.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import accumulator_dtype, addmm_fp32, check_numbers, check_tensors
from lowmem_grpo.kernels.frozen import FrozenStack
from lowmem_grpo.kernels.lora import pairs_of, scales_of, tensors_of
from lowmem_grpo.kernels.lora_factors import LoRA, shared_factors
from lowmem_grpo.kernels.thin_products import multiply


class ExpertPairs:
    """The pairs (A_e, B_e) of all experts, and with `trained` the sums of their gradients."""

    def __init__(self, lora: LoRA, experts: int, trained: bool = False) -> None:
        self.a, self.scale = lora.a.view(experts, -1, lora.a.shape[1]), lora.scale
        self.b = lora.b.view(len(lora.b), -1, experts).permute(2, 0, 1).contiguous()  # (E, out, r)
        kind = accumulator_dtype(lora.a.dtype)
        self.grads = [torch.zeros_like(part, dtype=kind) for part in (self.a, self.b) if trained]

    def add(self, y: Tensor, x: Tensor, expert: int) -> None:
        """Add LoRA of x (n, in) to y (n, out)."""
        y.addmm_(x @ self.a[expert].T, self.b[expert].T, alpha=self.scale)

    def back(self, total: Tensor, grad: Tensor, expert: int) -> Tensor:
        """Return d_low (n, r) = scale dy B_e for dy (n, out), and add d_low A_e to `total` (n, in)."""
        d_low = self.product(grad, self.b[expert])
        total.addmm_(d_low, self.a[expert])
        return d_low

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        out = left.new_empty(len(left), right.shape[1])
        multiply([(out, left, right, self.scale)])
        return out

    def collect(self, grad: Tensor, d_low: Tensor, x: Tensor, expert: int, factor: Tensor | None = None) -> None:
        """Add dA_e = d_low^T x and dB_e = dy^T low to the sums; rows of d_low and low (n, r) are first multiplied by
        `factor` (n, 1)."""
        low = self.product(x, self.a[expert].T)
        if factor is not None:
            d_low, low = ((part * factor).to(part.dtype) for part in (d_low, low))
        addmm_fp32(self.grads[0][expert], d_low.T, x)
        addmm_fp32(self.grads[1][expert], grad.T, low)

    def gradients(self) -> list[Tensor]:
        """Return dA (E r, in) and dB (out, r E)."""
        grad_a, grad_b = self.grads
        return [grad_a.flatten(0, 1), grad_b.permute(1, 2, 0).flatten(1)]


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

    def pairs(self, trained: bool = False) -> ExpertPairs | None:
        return None if self.lora is None else ExpertPairs(self.lora, self.stack.experts, trained)

    def project(self, x: Tensor, weight: Tensor, pairs: ExpertPairs | None, expert: int) -> Tensor:
        """Return y (n, out) for x (n, in) and an expert's weight (out, in)."""
        y = torch.nn.functional.linear(x, weight, None if self.bias is None else self.bias[expert])
        if pairs is not None:
            pairs.add(y, x, expert)
        return y

    def back(
        self, grad: Tensor, weight: Tensor, pairs: ExpertPairs | None, expert: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return dy W + d_low A (n, in) and d_low, if there is LoRA, for dy (n, out)."""
        back = grad @ weight
        return back, None if pairs is None else pairs.back(back, grad, expert)

    def dot(self, grad: Tensor, terms: Tensor, expert: int) -> Tensor:
        """Return dy y (n,): the sum of `terms` (n, in), the products of x and its gradient, and that of the bias."""
        total = terms.sum(1)
        return total if self.bias is None else total.addmv_(grad.to(total.dtype), self.bias[expert].to(total.dtype))


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
