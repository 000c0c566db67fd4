"""A mixture of experts on frozen weights: each row goes through k of E gated MLPs, and the results are summed.

    y_t = sum over j of w_tj  down_e (silu(gate_e x_t) * up_e x_t),    e = ids_tj

    back_tj = dy_t down_e;  dw_tj = back_tj . a_tj;  dx_t = sum over j of d(a_tj; w_tj back_tj) [gate_e; up_e]

with a = silu(gate) * up (Shazeer et al., arXiv 1701.06538; Qwen3, arXiv 2505.09388, section 2). x (T, D), ids and w
(T, k). Products and activations are in the dtype of x; w, its gradient and sums over experts are in float32. Experts
may have biases, another activation, and LoRA (expert_matrices.py), as those of gpt-oss (arXiv 2508.10925).

On a card, at most GROUPED_ROWS rows per expert on average go through `grouped_products.py`. More rows, rows on the CPU
and rows for experts in 16 bits go through one expert after the other, which is decoded into a shared buffer and applied
to at most PIECE rows of x at a time. The backward pass decodes and computes gate and up again: only x, ids, w and LoRA
are saved, before y is computed, as in `lora_mlp.py`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.clamped_swiglu import ClampedSwiGLU
from lowmem_grpo.kernels.custom_op import accumulator_dtype, check_tensors, custom_op, once_differentiable
from lowmem_grpo.kernels.expert_matrices import Matrices, OneByOne, check_added, in_dtype_of
from lowmem_grpo.kernels.frozen import FrozenStack
from lowmem_grpo.kernels.glu import (
    APPROXIMATE,
    Activation,
    activate_ref,
    check_activation,
    glu_backward,
    glu_forward,
    halves,
)
from lowmem_grpo.kernels.grouped_products import Places
from lowmem_grpo.kernels.lora import as_given, pairs_of, scales_of, tensors_of
from lowmem_grpo.kernels.lora_factors import LoRA, held_factors, shared_factors

PIECE = 2048  # rows of one expert that are computed together
GROUPED_ROWS = 64  # per expert, on average: one large tile each (not measured yet)


def routed_experts_ref(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: FrozenStack, down: FrozenStack, *,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, activation: Activation = "silu",
    gate_up_lora: LoRA | None = None, down_lora: LoRA | None = None,
) -> Tensor:
    """Compute `routed_experts` in plain torch, one expert after the other, dequantized; differentiable by autograd."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    for number in range(gate_up.experts):
        rows, places = torch.where(ids == number)
        both = project_ref(x[rows], gate_up, number, gate_up_bias, gate_up_lora)
        part = project_ref(gated_ref(both, activation), down, number, down_bias, down_lora)
        y = y.index_add(0, rows, part.to(wide) * weights[rows, places, None].to(wide))
    return y.to(x.dtype)


def project_ref(x: Tensor, stack: FrozenStack, number: int, bias: Tensor | None, lora: LoRA | None) -> Tensor:
    y = x @ stack.expert(number).dequantized().to(x.dtype).T
    if bias is not None:
        y = y + bias[number].to(x.dtype)
    if lora is not None:
        a = lora.a.view(stack.experts, -1, lora.a.shape[1])[number].to(x.dtype)
        b = lora.b.view(len(lora.b), -1, stack.experts)[..., number].to(x.dtype)
        y = y + lora.scale * ((x @ a.T) @ b.T)
    return y


def gated_ref(both: Tensor, activation: Activation) -> Tensor:
    """Compute h (..., I) from gate and up in one tensor (..., 2 I)."""
    gate, up = gate_and_up(both, activation)
    if not isinstance(activation, ClampedSwiGLU):
        return activate_ref(gate, activation) * up
    gate = gate.clamp(max=activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up.clamp(-activation.limit, activation.limit) + 1)


def gate_and_up(both: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return gate and up (..., I), views of both (..., 2 I)."""
    return (both[..., ::2], both[..., 1::2]) if isinstance(activation, ClampedSwiGLU) else halves(both)


def routed_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: FrozenStack, down: FrozenStack, *,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, activation: Activation = "silu",
    gate_up_lora: LoRA | None = None, down_lora: LoRA | None = None,
) -> Tensor:
    """Return (T, D) in the dtype of x, from x (T, D), ids (T, k) of an integer dtype, weights (T, k) float32 (float64
    with x in float64), gate_up (E, 2 I, D) and down (E, D, I). Gate's rows come first; for a `ClampedSwiGLU` they
    alternate with up's. x, weights and LoRA get gradients; the experts and their biases, (E, 2 I) and (E, D), are
    frozen. The ids of a row should differ. ValueError if shapes or dtypes do not fit.

    A LoRA holds the pairs of all experts as expert_matrices.py says, a (E r, in) and b (out, r E).
    """
    check_activation(activation)
    matrices = Matrices(gate_up, gate_up_bias, gate_up_lora), Matrices(down, down_bias, down_lora)
    check_arguments(x, ids, weights, *matrices)
    loras = [gate_up_lora, down_lora]
    x, weights = RoutedBackward.apply(x.contiguous(), weights, ids, matrices, activation, *tensors_of(loras))
    find = shared_factors if torch.is_grad_enabled() else held_factors
    return RoutedForward.apply(x, weights, ids, in_dtype_of(x, matrices, loras, find), activation)


def check_arguments(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Matrices, down: Matrices) -> None:
    """Raise ValueError, with the expected and the given shapes and dtypes, for an argument that does not fit."""
    check_tensors(x=x, ids=ids, weights=weights)
    stacks = gate_up.stack, down.stack
    if wrong := [type(stack).__name__ for stack in stacks if not isinstance(stack, FrozenStack)]:
        raise ValueError(f"expected gate_up and down as FrozenStack, by FrozenStack.from_weights; got {wrong}")
    experts, size, inner = down.stack.shape
    if gate_up.stack.shape != (experts, 2 * inner, size):
        raise ValueError(f"expected gate_up (E, 2 I, D) and down (E, D, I); got {gate_up.stack.shape}, "
                         f"{down.stack.shape}")
    if x.ndim != 2 or x.shape[1] != size or not x.is_floating_point():
        raise ValueError(f"expected x (T, {size}) of a floating dtype; got {tuple(x.shape)} {x.dtype}")
    if ids.ndim != 2 or len(ids) != len(x) or ids.is_floating_point() or ids.shape[1] > experts:
        raise ValueError(f"expected ids ({len(x)}, k) of an integer dtype, k at most {experts}; got "
                         f"{tuple(ids.shape)} {ids.dtype}")
    wide = torch.promote_types(x.dtype, torch.float32)
    if weights.shape != ids.shape or weights.dtype != wide:
        raise ValueError(f"expected weights {tuple(ids.shape)} in {wide}; got {tuple(weights.shape)} {weights.dtype}")
    named_parts: dict[str, Any] = {"ids": ids, "weights": weights}
    for name, one in (("gate_up", gate_up), ("down", down)):
        check_added(name, one)
        named_parts |= {name: one.stack, f"{name}_bias": one.bias}
        named_parts |= {} if one.lora is None else {f"{name}_lora.a": one.lora.a, f"{name}_lora.b": one.lora.b}
    if wrong := [name for name, part in named_parts.items() if part is not None and part.device != x.device]:
        raise ValueError(f"expected all on the device of x, {x.device}; {', '.join(wrong)} is not")


class RoutedBackward(torch.autograd.Function):
    """Saves x, weights, ids and LoRA, and passes x and weights on. Its backward pass gets dy from `RoutedForward`."""

    @staticmethod
    def forward(ctx, x, weights, ids, matrices, activation, *tensors):
        ctx.matrices, ctx.activation = tuple(Matrices(one.stack, one.bias) for one in matrices), activation
        ctx.scales = scales_of([one.lora for one in matrices])
        ctx.save_for_backward(x, weights, ids, *tensors)
        return x.detach(), weights.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        x, weights, ids, *tensors = ctx.saved_tensors
        needs_x, needs_weights, *_ = ctx.needs_input_grad
        matrices = in_dtype_of(x, ctx.matrices, pairs_of(tensors, ctx.scales))
        with torch.autocast(x.device.type, enabled=False):
            found = routed_backward_op(grad.contiguous(), x, ids, weights, *flat(matrices, ctx.activation))
        grad_x, grad_weights, *grads = found
        rest = iter(grads)
        grads = as_given([None if one is None else next(rest) for one in tensors], tensors)
        return grad_x if needs_x else None, grad_weights if needs_weights else None, None, None, None, *grads


class RoutedForward(torch.autograd.Function):
    """Computes y from the tensors that `RoutedBackward` saved. Its backward pass passes dy on unchanged."""

    @staticmethod
    def forward(ctx, x, weights, ids, matrices, activation):
        with torch.autocast(x.device.type, enabled=False):
            y: Tensor = routed_forward_op(x, ids, weights, *flat(matrices, activation))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None, None, None, None


def flat(matrices: Iterable[Matrices], activation: Activation = "silu") -> list[Any]:
    """Return the experts as operations take them."""
    text = activation if isinstance(activation, str) else activation.text
    return [part for one in matrices for part in one.parts] + [text]


def routed_forward(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up_kind: str, gate_up: list[Tensor], gate_up_sizes: list[int],
    gate_up_added: list[Tensor | None], gate_up_scale: float, down_kind: str, down: list[Tensor],
    down_sizes: list[int], down_added: list[Tensor | None], down_scale: float, activation: str,
) -> Tensor:
    """Return y (T, D) in the dtype of x."""
    inner = Matrices.from_parts(x.dtype, gate_up_kind, gate_up, gate_up_sizes, gate_up_added, gate_up_scale)
    outer = Matrices.from_parts(x.dtype, down_kind, down, down_sizes, down_added, down_scale)
    gating = activation if activation in APPROXIMATE else ClampedSwiGLU.from_text(activation)
    if takes(x, ids, inner, outer):
        return grouped_forward(x, ids, weights, inner, outer, gating)
    y = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    first, second = OneByOne(inner), OneByOne(outer)
    for expert, tokens, places, *decoded in by_expert(x, ids, inner.stack, outer.stack):
        both = first.project(x[tokens], decoded[0], expert)
        part = second.project(glu_forward(*gate_and_up(both, gating), gating), decoded[1], expert)
        y.index_add_(0, tokens, part.to(y.dtype).mul_(weights.flatten()[places, None]))
    return y.to(x.dtype)


def routed_backward(
    grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, gate_up_kind: str, gate_up: list[Tensor],
    gate_up_sizes: list[int], gate_up_added: list[Tensor | None], gate_up_scale: float, down_kind: str,
    down: list[Tensor], down_sizes: list[int], down_added: list[Tensor | None], down_scale: float, activation: str,
) -> list[Tensor]:
    """Return dx (T, D) and dw (T, k), in the dtypes of x and weights, for the gradient `grad` of y (T, D); then dA and
    dB of gate_up's LoRA and of down's, where there is one, in float32 or float64."""
    inner = Matrices.from_parts(x.dtype, gate_up_kind, gate_up, gate_up_sizes, gate_up_added, gate_up_scale)
    outer = Matrices.from_parts(x.dtype, down_kind, down, down_sizes, down_added, down_scale)
    gating = activation if activation in APPROXIMATE else ClampedSwiGLU.from_text(activation)
    if takes(x, ids, inner, outer):
        return grouped_backward(grad, x, ids, weights, inner, outer, gating)
    grad_x = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    grad_weights = torch.zeros_like(weights, memory_format=torch.contiguous_format)
    first, second = OneByOne(inner, trained=True), OneByOne(outer, trained=True)
    for expert, tokens, places, *decoded in by_expert(x, ids, inner.stack, outer.stack):
        rows, dy, factor = x[tokens], grad[tokens], weights.flatten()[places, None]
        both = first.project(rows, decoded[0], expert)
        back, low = second.back(dy, decoded[1], expert)
        back = back.to(weights.dtype)
        product = (back * factor).to(x.dtype)
        glu_backward(product, *gate_and_up(both, gating), gating)  # both: its gradient now; product: down's input
        grad_weights.view(-1)[places] = second.dot(dy, back.mul_(product), expert)
        second.collect(dy, low, product, expert, factor)
        back, low = first.back(both, decoded[0], expert)
        grad_x.index_add_(0, tokens, back.to(grad_x.dtype))
        first.collect(both, low, rows, expert)
    return [grad_x.to(x.dtype), grad_weights, *first.gradients(), *second.gradients()]


def takes(x: Tensor, ids: Tensor, gate_up: Matrices, down: Matrices) -> bool:
    few = 0 < ids.numel() <= GROUPED_ROWS * gate_up.stack.experts
    return few and gate_up.stack.weight.can_group(x) and down.stack.weight.can_group(x)


def grouped_forward(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Matrices, down: Matrices, activation: Activation = "silu"
) -> Tensor:
    """Return y (T, D) through the grouped kernels."""
    at = ids.flatten().long()
    places = Places.from_ids(at, gate_up.stack.experts)
    h = glu_forward(*gate_and_up(gate_up.grouped(x, at, places), activation), activation)
    if down.bias is None and down.lora is None:  # the kernel multiplies by the weights
        parts = down.stack.weight.grouped(h, down.stack.experts, places, scale=weights.flatten())
        return parts.view(*ids.shape, -1).sum(1)
    parts = down.grouped(h, at, places).view(*ids.shape, -1)
    return (parts * weights[..., None]).sum(1).to(x.dtype)


def grouped_backward(
    grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Matrices, down: Matrices,
    activation: Activation = "silu",
) -> list[Tensor]:
    """Return what `routed_backward` does, through the grouped kernels."""
    at, factor = ids.flatten().long(), weights.flatten()[:, None]
    places = Places.from_ids(at, gate_up.stack.experts)
    both = gate_up.grouped(x, at, places)
    back, low = down.grouped_back(grad, at, places)
    back = back.to(weights.dtype)
    product = (back * factor).to(x.dtype)
    glu_backward(product, *gate_and_up(both, activation), activation)  # both: its gradient; product: down's input
    grad_weights = back.mul_(product).sum(1).view(ids.shape)
    if down.bias is not None:
        grad_weights += (grad.to(back.dtype) @ down.bias.T.to(back.dtype)).gather(1, at.view(ids.shape))
    down_grads = down.grouped_gradients(grad, low, product, at, factor)
    back, low = gate_up.grouped_back(both, at, places)
    grads = gate_up.grouped_gradients(both, low, x, at) + down_grads
    return [back.view(*ids.shape, -1).sum(1), grad_weights, *grads]


def by_expert(
    x: Tensor, ids: Tensor, gate_up: FrozenStack, down: FrozenStack
) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
    """Yield at most PIECE rows of an expert at a time: its number, the rows' indices in x and in the flattened ids, and
    the expert's two weights. The host waits for the device."""
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=gate_up.experts)
    inner, outer = (x.new_empty(stack.shape[1:]) for stack in (gate_up, down))
    start = 0
    for number, count in enumerate(counts.tolist()):
        if count:
            weights = gate_up.expert(number).filled(inner), down.expert(number).filled(outer)
            for places in order[start : start + count].split(PIECE):
                yield number, places // ids.shape[1], places, *weights
        start += count


def empty_gradients(grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, *parts: Any) -> list[Tensor]:
    """Return what `routed_backward` does, uninitialised."""
    pairs = [one for added in (parts[3], parts[8]) for one in added[1:] if one is not None]
    kind = accumulator_dtype(x.dtype)
    return [torch.empty_like(x), torch.empty_like(weights), *(one.new_empty(one.shape, dtype=kind) for one in pairs)]


routed_forward_op = custom_op("routed_forward", routed_forward, fake=lambda x, *_: torch.empty_like(x))
routed_backward_op = custom_op("routed_backward", routed_backward, fake=empty_gradients)
