"""Rotary position embedding of queries and keys in one launch (Su et al., arXiv 2104.09864), half-split layout.

    x = (x1, x2, rest), x1 and x2 (R / 2), cos = (c1, c2), sin = (s1, s2), R <= D
    forward     (x1 c1 - x2 s1, x2 c2 + x1 s2, rest)
    backward    (g1 c1 + g2 s2, g2 c2 - g1 s1, rest)         the rotation by minus the angle where c1 = c2, s1 = s2

Matches transformers' apply_rotary_pos_emb, Phi3's with R < D included: with cos and sin in the dtype of q each product
is rounded to it; with float32 cos and sin and a 16-bit q the result is rounded once. A model's scaling of its
frequencies (llama3, yarn, longrope, linear, dynamic) is in cos and sin already. Only cos and sin are kept for backward.
"""

from itertools import product

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import check_tensors, custom_op, once_differentiable
from lowmem_grpo.kernels.triton_utils import TRITON_TYPES, Launch, Variant, next_power_of_2, read, tl, triton, types_of

MAX_WIDTH = 1024  # columns of cos and sin


def rope_ref(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, heads_first: bool = True) -> tuple[Tensor, Tensor]:
    """Compute `rope` in plain torch."""
    views = (tokens_first(x, heads_first) for x in (q, k))
    turned = [rotated(x, angles(cos)[:, :, None], angles(sin)[:, :, None]) for x in views]
    q_out, k_out = (x.transpose(1, 2) if heads_first else x for x in turned)
    return q_out.view(q.shape), k_out.view(k.shape)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> Tensor:
    """Return x (..., D) rotated by cos and sin (..., R), which broadcast over heads. `backward` gives the adjoint."""
    half = cos.shape[-1] // 2
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    turned = turning * cos
    (x1, x2), (s1, s2) = turning.split(half, -1), sin.split(half, -1)
    if backward:
        turned[..., :half] += x2 * s2
        turned[..., half:] -= x1 * s1
    else:
        turned[..., :half] -= x2 * s1
        turned[..., half:] += x1 * s2
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def launch_rule(half: int) -> Launch:
    """Return a launch in which a program rotates all heads of a token, 1,024 pairs at a time. Products and sums are not
    fused, so that each product is rounded, as in transformers."""
    block = max(16, next_power_of_2(half))
    return Launch({"BLOCK_H": 1024 // block, "BLOCK_R": block}, num_warps=4, num_stages=1, fused=False)


@triton.jit
def rounded(values, kind):
    return values.to(kind).to(tl.float32)


@triton.jit
def turn_heads(
    x_ptr, out_ptr, cos_ptr, sin_ptr, heads, half, width, x_stride, out_stride,
    BACKWARD: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """Rotate all heads of one token of q or k; copy the columns after the rotated ones, up to `width`."""
    kind: tl.constexpr = cos_ptr.dtype.element_ty
    out_kind: tl.constexpr = out_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK_R)[None, :]
    for start in range(0, heads, BLOCK_H):
        head = (start + tl.arange(0, BLOCK_H))[:, None].to(tl.int64)
        inside = (head < heads) & (columns < half)
        x_rows = x_ptr + head * x_stride
        out_rows = out_ptr + head * out_stride
        x1 = read(x_rows, columns, inside)
        x2 = read(x_rows + half, columns, inside)
        # cos and sin are read once per head, from the cache, where they are used
        c1 = read(cos_ptr + 0 * head, columns, inside)
        c2 = read(cos_ptr + half + 0 * head, columns, inside)
        s1 = read(sin_ptr + 0 * head, columns, inside)
        s2 = read(sin_ptr + half + 0 * head, columns, inside)
        if BACKWARD:
            y1 = rounded(x1 * c1, kind) + rounded(x2 * s2, kind)
            y2 = rounded(x2 * c2, kind) - rounded(x1 * s1, kind)
        else:
            y1 = rounded(x1 * c1, kind) - rounded(x2 * s1, kind)
            y2 = rounded(x2 * c2, kind) + rounded(x1 * s2, kind)
        tl.store(out_rows + columns, y1.to(out_kind), mask=inside)
        tl.store(out_rows + half + columns, y2.to(out_kind), mask=inside)
        for rest in range(2 * half, width, BLOCK_R):
            inside = (head < heads) & (rest + columns < width)
            tl.store(out_rows + rest + columns, tl.load(x_rows + rest + columns, mask=inside), mask=inside)


@triton.jit
def rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, T, q_heads, k_heads, half, q_width, k_width,
    q_batch, q_token, q_head, k_batch, k_token, k_head, q_out_batch, q_out_token, q_out_head,
    k_out_batch, k_out_token, k_out_head, angle_batch, angle_token,
    BACKWARD: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):
    batch = (tl.program_id(0) // T).to(tl.int64)
    token = (tl.program_id(0) % T).to(tl.int64)
    cos_ptr += batch * angle_batch + token * angle_token
    sin_ptr += batch * angle_batch + token * angle_token
    turn_heads(
        q_ptr + batch * q_batch + token * q_token, q_out_ptr + batch * q_out_batch + token * q_out_token,
        cos_ptr, sin_ptr, q_heads, half, q_width, q_head, q_out_head, BACKWARD, BLOCK_H, BLOCK_R,
    )
    turn_heads(
        k_ptr + batch * k_batch + token * k_token, k_out_ptr + batch * k_out_batch + token * k_out_token,
        cos_ptr, sin_ptr, k_heads, half, k_width, k_head, k_out_head, BACKWARD, BLOCK_H, BLOCK_R,
    )


def tokens_first(x: Tensor, heads_first: bool) -> Tensor:
    """Return q or k of any accepted shape as a view (B, T, H, D)."""
    x = x if x.ndim == 4 else x.unsqueeze(0)
    return x.transpose(1, 2) if heads_first else x


def new_like(x: Tensor) -> Tensor:
    """Return an uninitialised tensor in the layout of x, or contiguous if the columns of x are not adjacent."""
    return torch.empty_like(x) if x.stride(-1) == 1 else x.new_empty(x.shape)


def rope_new_triton(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_first: bool, backward: bool
) -> tuple[Tensor, Tensor]:
    q_out, k_out = new_like(q), new_like(k)
    q, k = (x if x.stride(-1) == 1 else out.copy_(x) for x, out in ((q, q_out), (k, k_out)))
    views = [tokens_first(x, heads_first) for x in (q, k, q_out, k_out)]
    batch, tokens, q_heads, width = views[0].shape
    turning = cos.shape[-1]
    strides = [stride for view in views for stride in view.stride()[:3]]
    rope_kernel[(batch * tokens,)](
        q, k, q_out, k_out, cos, sin, tokens, q_heads, views[1].shape[2], turning // 2,
        width, width, *strides, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), BACKWARD=backward,
        **launch_rule(turning // 2).options,
    )
    return q_out, k_out


def rope_new_cpu(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_first: bool, backward: bool
) -> tuple[Tensor, Tensor]:
    q_out, k_out = new_like(q), new_like(k)
    for x, out in ((q, q_out), (k, k_out)):
        values = rotated(tokens_first(x, heads_first), cos[:, :, None], sin[:, :, None], backward)
        tokens_first(out, heads_first).copy_(values)
    return q_out, k_out


rope_new = custom_op("rope_new", rope_new_cpu, rope_new_triton, fake=lambda q, k, *_: (new_like(q), new_like(k)))


class RopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, heads_first):
        ctx.save_for_backward(cos, sin)
        ctx.heads_first = heads_first
        return rope_new(q, k, cos, sin, heads_first, False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_q, grad_k):
        cos, sin = ctx.saved_tensors
        # new tensors, as autograd may have passed these gradients to other nodes too
        return *rope_new(grad_q, grad_k, cos, sin, ctx.heads_first, True), None, None, None


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, heads_first: bool = True) -> tuple[Tensor, Tensor]:
    """Return (q, k) rotated, in one launch.

    q and k are (B, H, T, D), as in transformers, or with `heads_first=False` (B, T, H, D) or packed (T, H, D); k may
    have fewer heads. cos and sin are (T, R), (1, T, R) or (B, T, R), in the dtype of q or float32; R is even and at
    most D and 1,024. They get no gradient. Columns of q and k from R on stay as they are.
    """
    check_arguments(q, k, cos, sin, heads_first)
    if q.numel() == 0 and k.numel() == 0:
        return rope_ref(q, k, cos, sin, heads_first=heads_first)
    return RopeFunction.apply(q, k, angles(cos), angles(sin), heads_first)


def angles(values: Tensor) -> Tensor:
    """Return cosines or sines as (B or 1, T, R)."""
    return (values if values.ndim == 3 else values[None]).contiguous()


def check_arguments(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_first: bool) -> None:
    """Raise ValueError, with the expected and the given shapes and dtypes, for an argument that does not fit."""
    check_tensors(q=q, k=k, cos=cos, sin=sin)
    order = "(B, H, T, D)" if heads_first else "(B, T, H, D) or (T, H, D)"
    shapes = [tuple(x.shape) for x in (q, k)]
    if q.ndim != k.ndim or q.ndim not in ((4,) if heads_first else (3, 4)):
        raise ValueError(f"expected q and k {order}; got {shapes[0]}, {shapes[1]}")
    (batch, tokens, _, width), (k_batch, k_tokens, _, k_width) = (tokens_first(x, heads_first).shape for x in (q, k))
    if (batch, tokens, width) != (k_batch, k_tokens, k_width):
        raise ValueError(f"expected q and k {order} that differ only in H; got {shapes[0]}, {shapes[1]}")
    turning = cos.shape[-1] if cos.ndim else 0
    allowed = [(tokens, turning), (1, tokens, turning), (batch, tokens, turning)]
    if cos.shape != sin.shape or tuple(cos.shape) not in allowed:
        raise ValueError(f"expected cos and sin (T, R) or (B, T, R) for q {shapes[0]}, {order}; got "
                         f"{tuple(cos.shape)}, {tuple(sin.shape)}")
    if turning % 2 or not 0 < turning <= min(width, MAX_WIDTH):
        raise ValueError(f"expected cos of an even width R up to {min(width, MAX_WIDTH)}; got {tuple(cos.shape)}")
    if not q.is_floating_point() or q.dtype != k.dtype or cos.dtype != sin.dtype:
        raise ValueError(f"expected floating q and k of one dtype; got {q.dtype}, {k.dtype}; cos and sin of one dtype; "
                         f"got {cos.dtype}, {sin.dtype}")
    if cos.dtype not in (q.dtype, torch.float32):
        raise ValueError(f"expected cos and sin in {q.dtype} or float32; got {cos.dtype}")
    devices = [str(x.device) for x in (q, k, cos, sin)]
    if len(set(devices)) > 1:
        raise ValueError(f"expected one device; got {devices} for q, k, cos, sin")
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError("cos and sin carry no gradient here: detach them")


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    cases = []
    sizes = [2**power for power in range(4, 10)]
    for angle_type, half, backward in product(sorted({f"*{TRITON_TYPES[dtype]}", "*fp32"}), sizes, (False, True)):
        name = f"rope {half} cos {angle_type}{' backward' if backward else ''}"
        types = types_of(rope_kernel, dtype, cos_ptr=angle_type, sin_ptr=angle_type)
        cases.append(Variant(name, rope_kernel, types, launch_rule(half), {"BACKWARD": backward}))
    return cases
