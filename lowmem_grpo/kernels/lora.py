"""Linear layers with LoRA on one input (q, k, v; gate, up): frozen weights, plain or 4-bit, as one autograd node.

    y_i = x W_i^T + scale_i (x A_i^T) B_i^T
    dx = sum_i (dy_i W_i + scale_i (dy_i B_i) A_i);  dA_i = scale_i (dy_i B_i)^T x;  dB_i = scale_i dy_i^T (x A_i^T)

(Hu et al., arXiv 2106.09685, equation 3.) All the A_i are applied by one product with x, and again in the backward
pass, so that x is all that is kept. x (N, in), W_i (out_i, in), A_i (r_i, in), B_i (out_i, r_i).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowmem_grpo.kernels.matmul import matmul_fp32
from lowmem_grpo.kernels.nf4 import NF4Weight
from lowmem_grpo.kernels.nf4_linear import project, project_back

FrozenWeight = Tensor | NF4Weight


@dataclass(frozen=True)
class LoRA:
    """The low-rank pair of one linear layer: a (r, in), b (out, r), of any floating dtype, and their scale."""

    a: Tensor
    b: Tensor
    scale: float = 1.0


def lora_linear_ref(x: Tensor, weight: Tensor, lora: LoRA | None) -> Tensor:
    """One layer in plain torch: x (..., in), weight (out, in) -> (..., out)."""
    y = x @ weight.T
    if lora is None:
        return y
    return y + lora.scale * ((x @ lora.a.to(x.dtype).T) @ lora.b.to(x.dtype).T)


def lora_linear(
    x: Tensor, weights: Sequence[Any], loras: Sequence[LoRA | None], biases: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """The outputs (..., out_i) of several linear layers on the same x (..., in), which is kept once for all of them.

    A weight is a tensor (out, in) of the dtype of x, an `NF4Weight` or bitsandbytes' Params4bit; it takes no gradient,
    and neither does a bias (out,). A layer without LoRA has None in `loras`. Raises ValueError where shapes or dtypes
    do not fit.
    """
    frozen = [frozen_weight(weight) for weight in weights]
    given = [None] * len(frozen) if biases is None else list(biases)
    check_linears(x, frozen, loras)
    check_biases(frozen, given)
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled():
        outputs = LoRALinearFunction.apply(rows, frozen, given, scales_of(loras), *tensors_of(loras))
    else:
        outputs = forward_linears(rows, frozen, loras, given)
    return tuple(output.view(*x.shape[:-1], output.shape[-1]) for output in outputs)


class LoRALinearFunction(torch.autograd.Function):
    """Keeps x and the adapters; makes nothing else again but the products with A."""

    @staticmethod
    def forward(ctx, x, weights, biases, scales, *tensors):
        ctx.weights, ctx.scales = weights, scales
        ctx.save_for_backward(x, *tensors)
        ctx.set_materialize_grads(False)
        return tuple(forward_linears(x, weights, pairs_of(tensors, scales), biases))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, *tensors = ctx.saved_tensors
        loras = pairs_of(tensors, ctx.scales)
        grad_x, grad_tensors = backward_linears(grads, x, ctx.weights, loras, ctx.needs_input_grad[0])
        return grad_x, None, None, None, *as_given(grad_tensors, tensors)


def forward_linears(
    x: Tensor, weights: Sequence[FrozenWeight], loras: Sequence[LoRA | None],
    biases: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """The outputs (N, out_i) for x (N, in), without autograd."""
    outputs = []
    given = [None] * len(weights) if biases is None else biases
    for weight, bias, lora, low in zip(weights, given, loras, down_projections(x, loras), strict=True):
        y = project(x, weight, bias)
        if lora is not None and low is not None:
            y.addmm_(low, lora.b.to(x.dtype).T, alpha=lora.scale)
        outputs.append(y)
    return outputs


def backward_linears(
    grads: Sequence[Tensor | None], x: Tensor, weights: Sequence[FrozenWeight], loras: Sequence[LoRA | None],
    needs_x: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(dx (N, in) or None, [dA, dB of each layer] in float32, or float64 for such x) without autograd; a layer whose
    gradient is None adds nothing."""
    grad_x: Tensor | None = None
    grad_tensors: list[Tensor | None] = []
    for grad, weight, lora, low in zip(grads, weights, loras, down_projections(x, loras), strict=True):
        if grad is not None and needs_x:
            share = project_back(grad, weight)
            grad_x = share if grad_x is None else grad_x.add_(share)
        if grad is None or lora is None or low is None:
            grad_tensors += [None, None]
            continue
        grad_low = grad @ lora.b.to(x.dtype)  # (N, r)
        if grad_x is not None:
            grad_x.addmm_(grad_low, lora.a.to(x.dtype), alpha=lora.scale)
        for left, right in ((grad_low, x), (grad, low)):
            grad_tensors.append(matmul_fp32(left.T, right).mul_(lora.scale))
    return grad_x, grad_tensors


def as_given(grads: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients in the dtypes of their tensors."""
    pairs = zip(grads, tensors, strict=True)
    return [None if grad is None or like is None else grad.to(like.dtype) for grad, like in pairs]


def down_projections(x: Tensor, loras: Sequence[LoRA | None]) -> list[Tensor | None]:
    """x A_i^T (N, r_i) of each layer, by one product with all A_i; None where there is no LoRA."""
    present = [lora for lora in loras if lora is not None]
    if not present:
        return [None] * len(loras)
    if len(loras) == 1:
        return [x @ present[0].a.to(x.dtype).T]
    low = x @ torch.cat([lora.a.to(x.dtype) for lora in present]).T
    parts = iter(low.split([lora.a.shape[0] for lora in present], dim=1))
    return [None if lora is None else next(parts) for lora in loras]


def frozen_weight(weight: Any) -> FrozenWeight:
    """bitsandbytes' Params4bit as an NF4Weight; everything else unchanged."""
    return NF4Weight.from_bitsandbytes(weight) if hasattr(weight, "quant_state") else weight


def tensors_of(loras: Sequence[LoRA | None]) -> list[Tensor | None]:
    """[a, b] of each layer, None where there is no LoRA: what an autograd function takes."""
    return [tensor for lora in loras for tensor in ((None, None) if lora is None else (lora.a, lora.b))]


def scales_of(loras: Sequence[LoRA | None]) -> list[float]:
    return [0.0 if lora is None else lora.scale for lora in loras]


def pairs_of(tensors: Sequence[Tensor | None], scales: Sequence[float]) -> list[LoRA | None]:
    """The inverse of `tensors_of` and `scales_of`."""
    pairs = zip(tensors[::2], tensors[1::2], scales, strict=True)
    return [None if a is None or b is None else LoRA(a, b, scale) for a, b, scale in pairs]


def check_linears(x: Tensor, weights: Sequence[FrozenWeight], loras: Sequence[LoRA | None]) -> None:
    """Raise ValueError that says what was expected and what was got."""
    if len(weights) != len(loras):
        raise ValueError(f"expected one entry of loras for each weight; got {len(weights)} and {len(loras)}")
    for weight, lora in zip(weights, loras, strict=True):
        if len(weight.shape) != 2 or weight.shape[1] != x.shape[-1] or weight.dtype != x.dtype:
            raise ValueError(
                f"expected a weight (out, {x.shape[-1]}) of {x.dtype}; got {tuple(weight.shape)} of {weight.dtype}"
            )
        if isinstance(weight, Tensor) and weight.requires_grad and torch.is_grad_enabled():
            raise ValueError("the weights are frozen: call weight.requires_grad_(False) and train LoRA")
        if lora is None:
            continue
        rank = lora.a.shape[0]
        expected = ((rank, weight.shape[1]), (weight.shape[0], rank))
        if (tuple(lora.a.shape), tuple(lora.b.shape)) != expected:
            raise ValueError(
                f"expected LoRA a {expected[0]} and b {expected[1]}; got {tuple(lora.a.shape)}, {tuple(lora.b.shape)}"
            )


def check_biases(weights: Sequence[FrozenWeight], biases: Sequence[Tensor | None]) -> None:
    """Raise ValueError that says what was expected and what was got."""
    if len(biases) != len(weights):
        raise ValueError(f"expected one entry of biases for each weight; got {len(weights)} and {len(biases)}")
    for weight, bias in zip(weights, biases, strict=True):
        if bias is not None and (tuple(bias.shape) != (weight.shape[0],) or bias.dtype != weight.dtype):
            raise ValueError(f"expected a bias ({weight.shape[0]},) of {weight.dtype}; got {tuple(bias.shape)} of "
                             f"{bias.dtype}")
        if bias is not None and bias.requires_grad and torch.is_grad_enabled():
            raise ValueError("biases are frozen: call bias.requires_grad_(False) and train LoRA")
