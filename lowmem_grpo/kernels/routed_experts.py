"""A mixture of experts on frozen weights: each row goes through k of E gated MLPs, and the results are summed.

    y_t = sum over j of w_tj  down_e (silu(gate_e x_t) * up_e x_t),    e = ids_tj

    back_tj = dy_t down_e;  dw_tj = back_tj . a_tj;  dx_t = sum over j of d(a_tj; w_tj back_tj) [gate_e; up_e]

with a = silu(gate) * up (Shazeer et al., arXiv 1701.06538; Qwen3, arXiv 2505.09388, section 2). x (T, D), ids and w
(T, k). Products and activations are in the dtype of x; w, its gradient and sums over experts are in float32.

On a card, at most GROUPED_ROWS rows per expert on average go through `nf4_grouped.py`. More rows, rows on the CPU and
rows for experts in 16 bits go through one expert after the other, which is decoded into a shared buffer and applied to
at most PIECE rows of x at a time. The backward pass decodes and computes gate and up again: only x, ids and w are
saved, before y is computed, as in `lora_mlp.py`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import check_tensors, custom_op, once_differentiable
from lowmem_grpo.kernels.frozen import FrozenStack
from lowmem_grpo.kernels.glu import glu_backward, glu_forward, halves
from lowmem_grpo.kernels.nf4_grouped import Places

PIECE = 2048  # rows of one expert that are computed together
GROUPED_ROWS = 64  # per expert, on average: one large tile each (not measured yet)


def routed_experts_ref(x: Tensor, ids: Tensor, weights: Tensor, gate_up: FrozenStack, down: FrozenStack) -> Tensor:
    """Compute `routed_experts` in plain torch, one expert after the other, dequantized; differentiable by autograd."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    for number in range(gate_up.experts):
        rows, places = torch.where(ids == number)
        inner, outer = (stack.expert(number).dequantized().to(x.dtype) for stack in (gate_up, down))
        gate, up = (x[rows] @ inner.T).chunk(2, -1)
        part = (torch.nn.functional.silu(gate) * up) @ outer.T
        y = y.index_add(0, rows, part.to(wide) * weights[rows, places, None].to(wide))
    return y.to(x.dtype)


def routed_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: FrozenStack, down: FrozenStack) -> Tensor:
    """Return (T, D) in the dtype of x, from x (T, D), ids (T, k) of an integer dtype, weights (T, k) float32 (float64
    with x in float64), gate_up (E, 2 I, D), gate's rows first, and down (E, D, I). x and weights get gradients; the
    experts are frozen. The ids of a row should differ. ValueError if shapes or dtypes do not fit."""
    check_arguments(x, ids, weights, gate_up, down)
    x, weights = RoutedBackward.apply(x.contiguous(), weights, ids, gate_up, down)
    return RoutedForward.apply(x, weights, ids, gate_up, down)


def check_arguments(x: Tensor, ids: Tensor, weights: Tensor, gate_up: FrozenStack, down: FrozenStack) -> None:
    """Raise ValueError, with the expected and the given shapes and dtypes, for an argument that does not fit."""
    check_tensors(x=x, ids=ids, weights=weights)
    if wrong := [type(stack).__name__ for stack in (gate_up, down) if not isinstance(stack, FrozenStack)]:
        raise ValueError(f"expected gate_up and down as FrozenStack, by FrozenStack.from_weights; got {wrong}")
    experts, size, inner = down.shape
    if gate_up.shape != (experts, 2 * inner, size):
        raise ValueError(f"expected gate_up (E, 2 I, D) and down (E, D, I); got {gate_up.shape}, {down.shape}")
    if x.ndim != 2 or x.shape[1] != size or not x.is_floating_point():
        raise ValueError(f"expected x (T, {size}) of a floating dtype; got {tuple(x.shape)} {x.dtype}")
    if ids.ndim != 2 or len(ids) != len(x) or ids.is_floating_point() or ids.shape[1] > experts:
        raise ValueError(f"expected ids ({len(x)}, k) of an integer dtype, k at most {experts}; got "
                         f"{tuple(ids.shape)} {ids.dtype}")
    wide = torch.promote_types(x.dtype, torch.float32)
    if weights.shape != ids.shape or weights.dtype != wide:
        raise ValueError(f"expected weights {tuple(ids.shape)} in {wide}; got {tuple(weights.shape)} {weights.dtype}")
    places: dict[str, Tensor | FrozenStack] = {"ids": ids, "weights": weights, "gate_up": gate_up, "down": down}
    if wrong := [name for name, part in places.items() if part.device != x.device]:
        raise ValueError(f"expected all on the device of x, {x.device}; {', '.join(wrong)} is not")


class RoutedBackward(torch.autograd.Function):
    """Saves x, weights and ids, and passes x and weights on. Its backward pass gets dy from `RoutedForward`."""

    @staticmethod
    def forward(ctx, x, weights, ids, gate_up, down):
        ctx.stacks = gate_up, down
        ctx.save_for_backward(x, weights, ids)
        return x.detach(), weights.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        x, weights, ids = ctx.saved_tensors
        needs_x, needs_weights, *_ = ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            grad_x, grad_weights = routed_backward_op(grad.contiguous(), x, ids, weights, *flat(*ctx.stacks))
        return grad_x if needs_x else None, grad_weights if needs_weights else None, None, None, None


class RoutedForward(torch.autograd.Function):
    """Computes y from the tensors that `RoutedBackward` saved. Its backward pass passes dy on unchanged."""

    @staticmethod
    def forward(ctx, x, weights, ids, gate_up, down):
        with torch.autocast(x.device.type, enabled=False):
            y: Tensor = routed_forward_op(x, ids, weights, *flat(gate_up, down))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None, None, None, None


def flat(gate_up: FrozenStack, down: FrozenStack) -> tuple[Any, ...]:
    return *gate_up.parts, *down.parts


def routed_forward(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up_kind: str, gate_up: list[Tensor], gate_up_sizes: list[int],
    down_kind: str, down: list[Tensor], down_sizes: list[int],
) -> Tensor:
    """Return y (T, D) in the dtype of x."""
    stacks = (FrozenStack.from_parts(gate_up_kind, gate_up, gate_up_sizes, x.dtype),
              FrozenStack.from_parts(down_kind, down, down_sizes, x.dtype))
    if takes(x, ids, *stacks):
        return grouped_forward(x, ids, weights, *stacks)
    y = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for tokens, places, inner, outer in by_expert(x, ids, *stacks):
        both = x[tokens] @ inner.T
        part = glu_forward(*halves(both), "silu") @ outer.T
        y.index_add_(0, tokens, part.to(y.dtype).mul_(weights.flatten()[places, None]))
    return y.to(x.dtype)


def routed_backward(
    grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, gate_up_kind: str, gate_up: list[Tensor],
    gate_up_sizes: list[int], down_kind: str, down: list[Tensor], down_sizes: list[int],
) -> tuple[Tensor, Tensor]:
    """Return dx (T, D) and dw (T, k), in the dtypes of x and weights, for the gradient `grad` of y (T, D)."""
    stacks = (FrozenStack.from_parts(gate_up_kind, gate_up, gate_up_sizes, x.dtype),
              FrozenStack.from_parts(down_kind, down, down_sizes, x.dtype))
    if takes(x, ids, *stacks):
        return grouped_backward(grad, x, ids, weights, *stacks)
    grad_x = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    grad_weights = torch.zeros_like(weights, memory_format=torch.contiguous_format)
    for tokens, places, inner, outer in by_expert(x, ids, *stacks):
        both = x[tokens] @ inner.T
        back = (grad[tokens] @ outer).to(weights.dtype)
        product = (back * weights.flatten()[places, None]).to(x.dtype)
        glu_backward(product, *halves(both), "silu")  # both: gradients of gate and up now; product: silu(gate) * up
        grad_weights.view(-1)[places] = back.mul_(product).sum(1)
        grad_x.index_add_(0, tokens, (both @ inner).to(grad_x.dtype))
    return grad_x.to(x.dtype), grad_weights


def takes(x: Tensor, ids: Tensor, gate_up: FrozenStack, down: FrozenStack) -> bool:
    few = 0 < ids.numel() <= GROUPED_ROWS * gate_up.experts
    return few and gate_up.weight.can_group(x) and down.weight.can_group(x)


def grouped_forward(x: Tensor, ids: Tensor, weights: Tensor, gate_up: FrozenStack, down: FrozenStack) -> Tensor:
    """Return y (T, D) through the grouped kernels."""
    places = Places.from_ids(ids.flatten(), gate_up.experts)
    both = gate_up.weight.grouped(x, gate_up.experts, places, ids.shape[1])
    parts = down.weight.grouped(glu_forward(*halves(both), "silu"), down.experts, places, scale=weights.flatten())
    return parts.view(*ids.shape, -1).sum(1)


def grouped_backward(
    grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, gate_up: FrozenStack, down: FrozenStack
) -> tuple[Tensor, Tensor]:
    """Return (dx (T, D), dw (T, k)) through the grouped kernels."""
    places = Places.from_ids(ids.flatten(), gate_up.experts)
    both = gate_up.weight.grouped(x, gate_up.experts, places, ids.shape[1])
    back = down.weight.grouped(grad, down.experts, places, ids.shape[1], back=True).to(weights.dtype)
    product = (back * weights.flatten()[:, None]).to(x.dtype)
    glu_backward(product, *halves(both), "silu")  # both: gradients of gate and up now; product: silu(gate) * up
    grad_weights = back.mul_(product).sum(1).view(ids.shape)
    return gate_up.weight.grouped(both, gate_up.experts, places, back=True).view(*ids.shape, -1).sum(1), grad_weights


def by_expert(
    x: Tensor, ids: Tensor, gate_up: FrozenStack, down: FrozenStack
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield at most PIECE rows of an expert at a time: their indices in x and in the flattened ids, and the expert's
    two weights. The host waits for the device."""
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=gate_up.experts)
    inner, outer = (x.new_empty(stack.shape[1:]) for stack in (gate_up, down))
    start = 0
    for number, count in enumerate(counts.tolist()):
        if count:
            weights = gate_up.expert(number).filled(inner), down.expert(number).filled(outer)
            for places in order[start : start + count].split(PIECE):
                yield places // ids.shape[1], places, *weights
        start += count


routed_forward_op = custom_op("routed_forward", routed_forward, fake=lambda x, *_: torch.empty_like(x))
routed_backward_op = custom_op(
    "routed_backward", routed_backward,
    fake=lambda _grad, x, _ids, weights, *_: (torch.empty_like(x), torch.empty_like(weights)),
)
