"""Convert packed tokens to a padded layout, one row a sequence, and back; each sequence gets a copy of a shared prompt.

    padded   y[s, w] = x[sources[s W + w]]      backward: grad_x[t] = sum_{j < copies[t]} grad_y at places[t] + j W
    packed   x[t] = y at places[t]              backward: grad_y at places[t] = grad_x[t], and 0 elsewhere

x (T, H, K) packed; y (S, H, W, K), with token w of sequence s at place s W + w; sources (S W,), places (T,) and copies
(T,) int64. Sequences that share a token are neighbours: `places` points into the first of them, and `copies` is their
number. Sums are taken in float32 in the order of the sequences, so that they are the same each time: `index_select`
would add its gradients in 16 bits and, on a card, by atomics in any order. Places of y after a sequence's end must get
no gradient. One launch converts queries, keys and values together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import custom_op, once_differentiable
from lowmem_grpo.kernels.triton_utils import Launch, Variant, flagged, next_power_of_2, tl, triton, types_of

TILE = 4096  # numbers per program


def packed_to_padded_ref(packed: list[Tensor], sources: Tensor, width: int) -> list[Tensor]:
    """Return packed (T, H, K) as padded (S, H, W, K), by plain torch."""
    return laid_side_by_side([x.index_select(0, sources) for x in packed], width)


def padded_to_packed_ref(side_by_side: Tensor, places: Tensor) -> Tensor:
    """Return padded (S, H, W, K) as packed (T, H, K), by plain torch."""
    return by_place(side_by_side).index_select(0, places)


def by_place(side_by_side: Tensor) -> Tensor:
    """Return y (S, H, W, K) as (S W, H, K): a view if its memory has that order, else a copy."""
    return side_by_side.transpose(1, 2).flatten(0, 1)


def laid_side_by_side(rows: list[Tensor], width: int) -> list[Tensor]:
    """Return each (S W, H, K) as a view (S, H, W, K)."""
    return [part.view(-1, width, *part.shape[1:]).transpose(1, 2) for part in rows]


def sum_copies_ref(grads: list[Tensor], sources: Tensor, places: Tensor, copies: Tensor, width: int) -> list[Tensor]:
    """Return grad_x (T, H, K) of each grad_y (S, H, W, K): on the CPU `index_add_` sums in the order of `sources`."""
    return [sum_rows(by_place(grad), sources, len(places)) for grad in grads]


def sum_rows(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """Return (count, H, K): sums of the rows (N, H, K) with equal `places` (N,), in float32 and rounded once."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return wide.new_zeros(count, *rows.shape[1:]).index_add_(0, places, wide).to(rows.dtype)


def packed_to_padded_cpu(packed: list[Tensor], sources: Tensor, places: Tensor | None, width: int) -> list[Tensor]:
    """Return each x (T, H, K) as y (S, H, W, K). With `places`, a token is copied only to its place; the rest is 0."""
    if places is None:
        return packed_to_padded_ref(packed, sources, width)
    return laid_side_by_side([sum_rows(part, places, len(sources)) for part in packed], width)


def launch_rule(head_size: int) -> Launch:
    block = max(16, next_power_of_2(head_size))
    return Launch({"BLOCK_N": max(1, TILE // block), "BLOCK_K": block}, num_stages=1)


@triton.jit
def copy_rows(x_ptr, y_ptr, row, source, inside, kept, head, heads, x_token, x_head, K, BLOCK_K: tl.constexpr):
    """Copy one head of some tokens, of any strides, to (N, heads, K)."""
    column = tl.arange(0, BLOCK_K)[None, :]
    numbers = inside[:, None] & (column < K)
    start = x_ptr + source[:, None] * x_token + head * x_head
    values = tl.load(start + column, mask=numbers & kept[:, None], other=0.0)
    tl.store(y_ptr + (row[:, None] * heads + head) * K + column, values, mask=numbers)


@triton.jit
def packed_to_padded_kernel(
    q_ptr, k_ptr, v_ptr, q_rows_ptr, k_rows_ptr, v_rows_ptr, sources_ptr, places_ptr, N, K, q_heads, k_heads, v_heads,
    q_token, q_head, k_token, k_head, v_token, v_head, ONCE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < N
    source = tl.load(sources_ptr + row, mask=inside, other=0)
    kept = inside
    if ONCE:
        kept = inside & (tl.load(places_ptr + source, mask=inside, other=-1) == row)
    head = tl.program_id(1).to(tl.int64)
    if head < q_heads:
        copy_rows(q_ptr, q_rows_ptr, row, source, inside, kept, head, q_heads, q_token, q_head, K, BLOCK_K)
    elif head < q_heads + k_heads:
        head -= q_heads
        copy_rows(k_ptr, k_rows_ptr, row, source, inside, kept, head, k_heads, k_token, k_head, K, BLOCK_K)
    else:
        head -= q_heads + k_heads
        copy_rows(v_ptr, v_rows_ptr, row, source, inside, kept, head, v_heads, v_token, v_head, K, BLOCK_K)


@triton.jit
def add_copies(
    grad_ptr, sum_ptr, token, place, copies, width, inside, head, heads, sequence_stride, head_stride, token_stride, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Sum one head of some tokens over the sequences that share them, in order and in float32."""
    column = tl.arange(0, BLOCK_K)[None, :]
    start = (place // width) * sequence_stride + (place % width) * token_stride + head * head_stride
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for number in range(0, tl.max(copies, 0)):
        there = (inside & (number < copies))[:, None] & (column < K)
        total += tl.load(grad_ptr + start[:, None] + column, mask=there, other=0.0).to(tl.float32)
        start += sequence_stride
    numbers = inside[:, None] & (column < K)
    tl.store(sum_ptr + (token[:, None] * heads + head) * K + column, total.to(sum_ptr.dtype.element_ty), mask=numbers)


@triton.jit
def sum_copies_kernel(
    q_ptr, k_ptr, v_ptr, q_sum_ptr, k_sum_ptr, v_sum_ptr, places_ptr, copies_ptr, T, K, width,
    q_heads, k_heads, v_heads, q_sequence, q_head, q_token, k_sequence, k_head, k_token, v_sequence, v_head, v_token,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = token < T
    place = tl.load(places_ptr + token, mask=inside, other=0)
    copies = tl.load(copies_ptr + token, mask=inside, other=0)
    head = tl.program_id(1).to(tl.int64)
    if head < q_heads:
        add_copies(q_ptr, q_sum_ptr, token, place, copies, width, inside, head, q_heads, q_sequence, q_head, q_token, K,
                   BLOCK_N, BLOCK_K)
    elif head < q_heads + k_heads:
        head -= q_heads
        add_copies(k_ptr, k_sum_ptr, token, place, copies, width, inside, head, k_heads, k_sequence, k_head, k_token, K,
                   BLOCK_N, BLOCK_K)
    else:
        head -= q_heads + k_heads
        add_copies(v_ptr, v_sum_ptr, token, place, copies, width, inside, head, v_heads, v_sequence, v_head, v_token, K,
                   BLOCK_N, BLOCK_K)


def three(tensors: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Return the tensors with a contiguous last dimension, filled up to three by the first one, and their numbers of
    heads, which are 0 for the added tensors."""
    near = [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]
    return near + near[:1] * (3 - len(near)), [tensor.shape[1] for tensor in near] + [0] * (3 - len(near))


def packed_to_padded_triton(packed: list[Tensor], sources: Tensor, places: Tensor | None, width: int) -> list[Tensor]:
    rows = [part.new_empty(len(sources), *part.shape[1:]) for part in packed]
    tensors, heads = three(packed)
    launch, size = launch_rule(packed[0].shape[2]), packed[0].shape[2]
    strides = [stride for part in tensors for stride in part.stride()[:2]]
    packed_to_padded_kernel[(-(-len(sources) // launch.constexprs["BLOCK_N"]), sum(heads))](
        *tensors, *rows, *rows[:1] * (3 - len(rows)), sources, sources if places is None else places, len(sources),
        size, *heads, *strides, ONCE=places is not None, **launch.options,
    )
    return laid_side_by_side(rows, width)


def new_sums(grads: list[Tensor], sources: Tensor, places: Tensor, copies: Tensor, width: int) -> list[Tensor]:
    return [grad.new_empty(len(places), grad.shape[1], grad.shape[3]) for grad in grads]


def sum_copies_triton(grads: list[Tensor], sources: Tensor, places: Tensor, copies: Tensor, width: int) -> list[Tensor]:
    """Launch the backward kernel on up to three tensors (S, H, W, K) of any strides."""
    sums = new_sums(grads, sources, places, copies, width)
    tensors, heads = three(grads)
    launch, size = launch_rule(grads[0].shape[3]), grads[0].shape[3]
    strides = [stride for grad in tensors for stride in grad.stride()[:3]]
    sum_copies_kernel[(-(-len(places) // launch.constexprs["BLOCK_N"]), sum(heads))](
        *tensors, *sums, *sums[:1] * (3 - len(sums)), places, copies, len(places), size, width, *heads, *strides,
        **launch.options,
    )
    return sums


def new_rows(packed: list[Tensor], sources: Tensor, places: Tensor | None, width: int) -> list[Tensor]:
    """Return uninitialised y (S, H, W, K) for each x (T, H, K)."""
    return laid_side_by_side([part.new_empty(len(sources), *part.shape[1:]) for part in packed], width)


packed_to_padded_op = custom_op("packed_to_padded", packed_to_padded_cpu, packed_to_padded_triton, fake=new_rows)
sum_copies = custom_op("sum_copies", sum_copies_ref, sum_copies_triton, fake=new_sums)


class PackedToPadded(torch.autograd.Function):
    """Maps each packed tensor (T, H, K) to padded (S, H, W, K)."""
    @staticmethod
    def forward(ctx, sources, places, copies, width, *packed):
        ctx.save_for_backward(sources, places, copies)
        ctx.width = width
        ctx.set_materialize_grads(False)
        return tuple(packed_to_padded_op(list(packed), sources, None, width))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        present = [grad for grad in grads if grad is not None]
        sums = iter(sum_copies(present, *ctx.saved_tensors, ctx.width) if present else [])
        return (None,) * 4 + tuple(None if grad is None else next(sums) for grad in grads)


class PaddedToPacked(torch.autograd.Function):
    """Maps padded (S, H, W, K) to packed (T, H, K)."""
    @staticmethod
    def forward(ctx, sources, places, side_by_side):
        ctx.save_for_backward(sources, places)
        ctx.width = side_by_side.shape[2]
        return padded_to_packed_ref(side_by_side, places)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return None, None, packed_to_padded_op([grad], *ctx.saved_tensors, ctx.width)[0]


def packed_to_padded(
    packed: Sequence[Tensor], sources: Tensor, places: Tensor, copies: Tensor, width: int
) -> tuple[Tensor, ...]:
    """Return one to three packed tensors (T, H, K), with one dtype and one K, as padded (S, H, W, K)."""
    return PackedToPadded.apply(sources, places, copies, width, *packed)


def padded_to_packed(side_by_side: Tensor, sources: Tensor, places: Tensor) -> Tensor:
    """Return padded (S, H, W, K) as packed (T, H, K), each token from the first sequence that has it."""
    return PaddedToPacked.apply(sources, places, side_by_side)


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    forward = types_of(packed_to_padded_kernel, dtype, sources_ptr="*i64", places_ptr="*i64")
    backward = types_of(sum_copies_kernel, dtype, places_ptr="*i64", copies_ptr="*i64")
    cases = []
    for size in (16, 32, 64, 128, 256):
        cases += flagged(f"packed_to_padded {size}", packed_to_padded_kernel, forward, launch_rule(size), ("ONCE",))
        cases.append(Variant(f"sum_copies {size}", sum_copies_kernel, backward, launch_rule(size)))
    return cases
