"""Attention by groups of heads: the backward pass runs group by group, so its buffers are those of one group only.

    out[:, g] = attention(q[:, g], k[:, g], v[:, g])        a group g: some key heads, and all queries that share them
    backward  for each group: its attention once more, then dq[:, g], dk[:, g], dv[:, g] from dout[:, g]

The backward pass of fused attention allocates float32 accumulators, and keys expanded to the number of query heads, for
all heads of its inputs; here its inputs are one group at a time. Only q, k and v are saved, and each group's forward is
recomputed. Heads are independent, so the gradient is the same for any number of groups.

q, k and v need not stay on the device while the layers after attention run backward: `without_waiting` recomputes them
when attention's backward pass begins. A node before attention saves them (`HeldFunction`), so the recomputation stops
there instead of running attention's forward pass as well.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lowmem_grpo.kernels.custom_op import once_differentiable

Attend = Callable[[Tensor, Tensor, Tensor, slice], Tensor]  # the query heads' places in the layer are given last


class HeldFunction(torch.autograd.Function):
    """Returns query, key and value unchanged, and saves them for attention's backward pass."""

    @staticmethod
    def forward(ctx: Any, *heads: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*heads)
        return tuple(part.view_as(part) for part in heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


class HeadGroupsFunction(torch.autograd.Function):
    """Applies `attend` by groups to query (S, H, Q, K), key and value (S, H_kv, L, K), which node `held` saves."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, held: Node, attend: Attend, groups: int) -> Tensor:
        ctx.held, ctx.attend, ctx.groups = held, attend, groups
        result = laid_by_tokens(query)
        for asked, own in ranges(query.shape[1], key.shape[1], groups):
            result[:, asked] = attend(query[:, asked], key[:, own], value[:, own], asked)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        heads = ctx.held.saved_tensors
        grads = [laid_by_tokens(tensor) for tensor in heads]
        for asked, own in ranges(heads[0].shape[1], heads[1].shape[1], ctx.groups):
            places = (asked, own, own)
            with torch.enable_grad(), saved_tensors_hooks(*[lambda tensor: tensor] * 2):  # overrides hooks that offload
                parts = [whole.detach()[:, place].requires_grad_() for whole, place in zip(heads, places, strict=True)]
                result = ctx.attend(*parts, asked)
            of_group = torch.autograd.grad(result, parts, grad[:, asked])
            for whole, place, part in zip(grads, places, of_group, strict=True):
                whole[:, place] = part
            del result, parts, of_group
        needed = zip(grads, ctx.needs_input_grad, strict=False)
        return *(tensor if wanted else None for tensor, wanted in needed), None, None, None


def by_head_groups(query: Tensor, key: Tensor, value: Tensor, attend: Attend, groups: int) -> Tensor:
    """Return `attend(query, key, value, slice(H))` (S, H, Q, K), whose backward pass takes the heads in `groups` parts,
    at most one per key head. query is (S, H, Q, K), key and value (S, H_kv, L, K). `attend` must draw no random
    numbers. A second derivative raises RuntimeError."""
    heads = HeldFunction.apply(query, key, value)
    held = next(part.grad_fn for part in heads if part.requires_grad)
    result: Tensor = HeadGroupsFunction.apply(*heads, held, attend, groups)
    return result


def without_waiting(module: nn.Module, compute: Callable[..., Any], *inputs: Any) -> Any:
    """Return `compute(*inputs)`, checkpointed. Saved are only `inputs`, and random states if `module` has dropout."""
    drops = module.training and any(isinstance(child, nn.Dropout) and child.p > 0 for child in module.modules())
    return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=drops)


def ranges(heads: int, key_heads: int, groups: int) -> Iterator[tuple[slice, slice]]:
    """Yield the query heads and key heads of each group: whole key heads with their queries, in near-equal groups."""
    count, shared = min(groups, key_heads), heads // key_heads
    for number in range(count):
        start, end = key_heads * number // count, key_heads * (number + 1) // count
        yield slice(start * shared, end * shared), slice(start, end)


def laid_by_tokens(like: Tensor) -> Tensor:
    """Return an empty tensor (S, H, T, K), stored as (S, T, H, K), the layout of the layers around attention."""
    rows, heads, tokens, size = like.shape
    return like.new_empty(rows, tokens, heads, size).transpose(1, 2)
