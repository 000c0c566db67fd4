"""Attention with sinks, on torch's fused kernels: each head has a logit that takes part in its softmax, but no value.

    lse = log sum_j exp(s_j)        out  = sum_j exp(s_j - lse) v_j       what the kernel gives, s_j the scores
    lse' = log(exp(lse) + exp(sink))    out' = exp(lse - lse') out = sum_j exp(s_j - lse') v_j

The kernel's backward pass needs its probabilities exp(s_j - lse), and the sums dout · out of its rows:

    ds_j = exp(s_j - lse) (dout · v_j - dout · out)

With lse' and out' in the place of lse and out, these are the gradients of the scores with the sink. torch gives the
log-sum-exp only by private operations, which are called in this file alone. Sinks are frozen.
"""

from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import CausalBias, CausalVariant

from lowmem_grpo.kernels.custom_op import once_differentiable
from lowmem_grpo.memory.cutting import ALIGNED

ATEN = torch.ops.aten
LOWER_RIGHT = int(CausalVariant.LOWER_RIGHT)


def attention_with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None,
                         is_causal: bool, scaling: float | None) -> Tensor:
    """Return attention (S, H, Q, K) of query (S, H, Q, K) over key and value (S, H_kv, L, K). `sinks` broadcasts to
    (S, H, Q). `mask` and `is_causal` are those of torch's attention. ValueError for sinks that would get a gradient."""
    if torch.is_grad_enabled() and sinks.requires_grad:
        raise ValueError("attention sinks require a gradient, which they do not get here: freeze them "
                         "(requires_grad_(False)), and train LoRA")
    query, key, value = as_autocast(query, key, value)
    if isinstance(mask, CausalBias):
        mask, is_causal = None, True
    added = None if mask is None else additive(mask, query).expand(*query.shape[:3], key.shape[2])
    if query.device.type == "cuda" and not takes_flash(query, key, value, added):  # the other takes as many key heads
        key, value = (heads.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for heads in (key, value))
    result: Tensor = SinksFunction.apply(query, key, value, sinks, added, is_causal, scaling)
    return result


class SinksFunction(torch.autograd.Function):
    """Computes `attention_with_sinks` for an additive mask (S, H, Q, L) or None, in one dtype."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None,
                is_causal: bool, scaling: float | None) -> Tensor:
        out, lse, ctx.others = fused_with_lse(query, key, value, mask, scaling, is_causal)
        real, logits = lse[..., : query.shape[2]], sinks.to(lse.dtype)
        out.mul_(torch.sigmoid(real - logits)[..., None])  # exp(lse - lse')
        if any(ctx.needs_input_grad):
            real.copy_(torch.logaddexp(real, logits))
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.is_causal, ctx.scaling = is_causal, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = fused_backward(grad, *ctx.saved_tensors, others=ctx.others, scaling=ctx.scaling,
                               is_causal=ctx.is_causal)
        return *grads, None, None, None, None


def fused_with_lse(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None,
                   is_causal: bool = False) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Return torch's fused attention (S, H, Q, K), its log-sum-exp (S, H, Q), with inf behind Q on some cards, and what
    `fused_backward` needs besides. `mask` is additive. `is_causal` lets the last Q of L tokens attend; on the CPU, Q is
    L then."""
    if query.device.type != "cuda":
        out, lse = ATEN._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=mask, scale=scaling)
        return out, lse, ()
    if takes_flash(query, key, value, mask):
        out, lse, *others = ATEN._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scaling)
        return out, lse, tuple(others[:6])
    if is_causal and query.shape[2] != key.shape[2]:  # only here, as torch's fake tensors lack its backward pass
        heads = (part.transpose(1, 2) for part in (query, key, value))
        out, lse, *others = ATEN._efficient_attention_forward(
            *heads, None, None, None, None, None, 0.0, LOWER_RIGHT, True, scale=scaling)
        return out.transpose(1, 2), lse, tuple(others)
    out, lse, *others = ATEN._scaled_dot_product_efficient_attention(
        query, key, value, mask, True, 0.0, is_causal, scale=scaling)
    return out, lse, tuple(others)


def fused_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, out: Tensor,
                   lse: Tensor, *, others: tuple[Any, ...], scaling: float | None,
                   is_causal: bool) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value for the gradient of `out`."""
    grads: tuple[Tensor, ...]
    if query.device.type != "cuda":
        grads = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, is_causal, attn_mask=mask, scale=scaling)
        return grads
    if takes_flash(query, key, value, mask):
        *most, seed, offset = others
        grads = ATEN._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, lse, *most, 0.0, is_causal, seed, offset, scale=scaling)
        return grads
    seed, offset, *most = others
    if most:  # of the last Q of L tokens
        grad, query, key, value, out = (part.transpose(1, 2) for part in (grad, query, key, value, out))
        grads = ATEN._efficient_attention_backward(
            grad, query, key, value, None, out, None, None, *most, lse, 0.0, seed, offset, LOWER_RIGHT, False,
            scale=scaling)[:3]
        return tuple(part.transpose(1, 2) for part in grads)
    grads = ATEN._scaled_dot_product_efficient_attention_backward(
        grad, query, key, value, mask, out, lse, seed, offset, 0.0, [True, True, True, False], is_causal,
        scale=scaling)[:3]
    return grads


def takes_flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch's flash kernel runs on this card (from sm_80) and takes these tensors (16 bits, no mask)."""
    return can_use_flash_attention(SDPAParams(query, key, value, mask, 0.0, False, query.shape[1] != key.shape[1]))


def additive(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask, boolean or additive, as an additive one in the dtype of `like`; on a card with aligned rows."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill_(~mask, -torch.inf)
    added = mask.to(like.dtype)
    if mask.device.type == "cuda" and any(step % ALIGNED for step in (added.storage_offset(), *added.stride()[:-1])):
        added = torch.nn.functional.pad(added, (0, -added.shape[-1] % ALIGNED))[..., : added.shape[-1]]
    return added


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in autocast's dtype if autocast is on, as torch's own attention does."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)
