"""Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467), fused with the residual sum before it.

    h = residual + x;   n = h * rstd,  rstd = 1 / sqrt(mean(h^2) + eps);   y = n * (offset + weight)
    grad_h = rstd * (g - n * mean(g * n)) + grad_sum,  g = grad_y * (offset + weight);   grad_weight = sum grad_y * n

h, y (N, D), weight (D,), rstd (N,) float32; without residual h is x, else h is a result and grad_sum its gradient. Two
orders of rounding, as in transformers: offset 0 rounds n to the dtype of x before the product (LlamaRMSNorm, and
Mistral, Qwen2, Qwen3, Phi3), any other offset, or `round_once`, rounds only the product (Gemma3RMSNorm: offset 1;
Olmo2RMSNorm, Gemma4RMSNorm: `round_once`). Kept for backward: h, weight and rstd.
"""

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import check_numbers, check_tensors, custom_op, once_differentiable
from lowmem_grpo.kernels.triton_utils import Launch, Variant, flagged, next_power_of_2, read, tl, triton, types_of

MAX_WIDTH = 65536
WHOLE_ROW = 8192  # columns up to which a row stays in registers; the blocks of a wider one are read twice
PARTIAL_SUMS = 512  # rows of sums, at most, in the first stage of grad_weight


def rms_norm_ref(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, residual: Tensor | None = None, offset: float = 0.0,
    round_once: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return y (..., D), or with `residual` the pair (y, residual + x), in plain torch."""
    h = x if residual is None else residual + x
    y = scaled(normalized(h, eps)[0], weight, h.dtype, offset, round_once)
    return y if residual is None else (y, h)


def normalized(h: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return n (..., D) and rstd (..., 1), in float32 or float64."""
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide * rstd, rstd


def scaled(n: Tensor, weight: Tensor, dtype: torch.dtype, offset: float, round_once: bool) -> Tensor:
    return (n * (offset + weight.to(n.dtype))).to(dtype) if offset or round_once else weight * n.to(dtype)


def launch_rule(columns: int) -> Launch:
    """Return a launch of 16 entries per thread: several narrow rows per program, one wide row, or one row in blocks."""
    whole = columns <= WHOLE_ROW
    block = max(64, next_power_of_2(columns)) if whole else 4096
    tile = max(2048, block)
    return Launch({"WHOLE_ROW": whole, "BLOCK_N": tile // block, "BLOCK_D": block}, tile // 512, num_stages=1)


@triton.jit
def rms_norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, rstd_ptr, N, D, x_stride, residual_stride, eps, offset,
    HAS_RESIDUAL: tl.constexpr, CAST_FIRST: tl.constexpr,
    WHOLE_ROW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    kind: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = row[:, None]
    blocks = 1 if WHOLE_ROW else tl.cdiv(D, BLOCK_D)
    h = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    squares = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for block in range(blocks):
        columns = block * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
        inside = (rows < N) & (columns < D)
        h = read(x_ptr + rows * x_stride, columns, inside)
        if HAS_RESIDUAL:
            h = (h + read(residual_ptr + rows * residual_stride, columns, inside)).to(kind).to(tl.float32)
            tl.store(sum_ptr + rows * D + columns, h.to(kind), mask=inside)
        squares += h * h
    rstd = tl.rsqrt(tl.sum(squares, 1) / D + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < N)
    for block in range(blocks):
        columns = block * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
        inside = (rows < N) & (columns < D)
        if not WHOLE_ROW:  # h is computed again, so that no thread reads what another has just written
            h = read(x_ptr + rows * x_stride, columns, inside)
            if HAS_RESIDUAL:
                h = (h + read(residual_ptr + rows * residual_stride, columns, inside)).to(kind).to(tl.float32)
        n = h * rstd[:, None]
        if CAST_FIRST:
            n = n.to(kind).to(tl.float32)
        y = n * (offset + read(weight_ptr + 0 * rows, columns, inside))
        tl.store(y_ptr + rows * D + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_bwd_kernel(
    grad_ptr, grad_sum_ptr, h_ptr, weight_ptr, rstd_ptr, grad_h_ptr, partial_ptr, N, D, rows_per_program,
    grad_stride, grad_sum_stride, h_stride, offset,
    HAS_GRAD_SUM: tl.constexpr, HAS_GRAD_WEIGHT: tl.constexpr,
    WHOLE_ROW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    partial_ptr += tl.program_id(0).to(tl.int64) * D  # this program's own row of sums: no atomics, one order
    partial = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    blocks = 1 if WHOLE_ROW else tl.cdiv(D, BLOCK_D)
    for step in range(0, rows_per_program, BLOCK_N):
        row = tl.program_id(0).to(tl.int64) * rows_per_program + step + tl.arange(0, BLOCK_N)
        rows = row[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < N, other=0.0)[:, None]
        n = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        grad = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        g = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        products = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for block in range(blocks):
            columns = block * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
            inside = (rows < N) & (columns < D)
            n = read(h_ptr + rows * h_stride, columns, inside) * rstd
            grad = read(grad_ptr + rows * grad_stride, columns, inside)
            g = grad * (offset + read(weight_ptr + 0 * rows, columns, inside))
            products += g * n
        mean = (tl.sum(products, 1) / D)[:, None]
        for block in range(blocks):
            columns = block * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
            inside = (rows < N) & (columns < D)
            if not WHOLE_ROW:
                n = read(h_ptr + rows * h_stride, columns, inside) * rstd
                grad = read(grad_ptr + rows * grad_stride, columns, inside)
                g = grad * (offset + read(weight_ptr + 0 * rows, columns, inside))
            grad_h = rstd * (g - n * mean)
            if HAS_GRAD_SUM:
                grad_h += read(grad_sum_ptr + rows * grad_sum_stride, columns, inside)
            tl.store(grad_h_ptr + rows * D + columns, grad_h.to(grad_h_ptr.dtype.element_ty), mask=inside)
            if HAS_GRAD_WEIGHT:
                if WHOLE_ROW:
                    partial += grad * n
                else:
                    so_far = read(partial_ptr, columns, (columns < D) & (step > 0))
                    tl.store(partial_ptr + columns, so_far + grad * n, mask=columns < D)
        if HAS_GRAD_WEIGHT and not WHOLE_ROW:
            tl.debug_barrier()  # the next row reads the sums that this one wrote
    if HAS_GRAD_WEIGHT and WHOLE_ROW:
        columns = tl.arange(0, BLOCK_D)
        tl.store(partial_ptr + columns, tl.sum(partial, 0), mask=columns < D)


def new_results(
    x: Tensor, weight: Tensor, residual: Tensor | None, offset: float, round_once: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialised y (N, D), residual + x (N, D) or empty, rstd (N,). A float32 weight may make y float32."""
    dtype = x.dtype if offset or round_once else torch.promote_types(x.dtype, weight.dtype)
    rstd = x.new_empty(x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(0 if residual is None else x.shape), rstd


def adjacent(rows: Tensor) -> Tensor:
    """Return rows (N, D) whose columns are adjacent in memory, copied only if they are not."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def rms_norm_fwd_triton(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, offset: float, round_once: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward kernel on rows (N, D) of any strides."""
    y, total, rstd = new_results(x, weight, residual, offset, round_once)
    rows, columns = x.shape
    launch = launch_rule(columns)
    x, weight = adjacent(x), weight.contiguous()
    other = x if residual is None else adjacent(residual)
    rms_norm_fwd_kernel[(-(-rows // launch.constexprs["BLOCK_N"]),)](
        x, other, weight, y, total, rstd, rows, columns, x.stride(0), other.stride(0), eps, float(offset),
        HAS_RESIDUAL=residual is not None, CAST_FIRST=not (offset or round_once), **launch.options,
    )
    return y, total, rstd


def rms_norm_bwd_triton(
    grad: Tensor, grad_sum: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor, offset: float, grad_weight: bool
) -> tuple[Tensor, Tensor]:
    """Launch the backward kernel on rows (N, D) of any strides, and add up its partial sums."""
    rows, columns = h.shape
    grad, h, weight = adjacent(grad), adjacent(h), weight.contiguous()
    other = grad if grad_sum is None else adjacent(grad_sum)
    launch = launch_rule(columns)
    rows_per_program = block = launch.constexprs["BLOCK_N"]
    if grad_weight:  # few programs, since each writes a partial sum
        rows_per_program *= -(-max(rows, 8 * PARTIAL_SUMS) // (PARTIAL_SUMS * block))
    programs = -(-rows // rows_per_program)
    grad_h = h.new_empty(h.shape)
    partial = rstd.new_empty(programs, columns) if grad_weight else rstd
    rms_norm_bwd_kernel[(programs,)](
        grad, other, h, weight, rstd, grad_h, partial, rows, columns, rows_per_program,
        grad.stride(0), other.stride(0), h.stride(0), float(offset),
        HAS_GRAD_SUM=grad_sum is not None, HAS_GRAD_WEIGHT=grad_weight, **launch.options,
    )
    return grad_h, partial.sum(0).to(weight.dtype) if grad_weight else weight.new_empty(0)


def rms_norm_fwd_cpu(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, offset: float, round_once: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (N, D), residual + x (N, D; empty without residual), rstd (N,)."""
    y, total, rstd = new_results(x, weight, residual, offset, round_once)
    h = x if residual is None else torch.add(residual, x, out=total)
    n, wide_rstd = normalized(h, eps)
    return y.copy_(scaled(n, weight, x.dtype, offset, round_once)), total, rstd.copy_(wide_rstd[:, 0])


def rms_norm_bwd_cpu(
    grad: Tensor, grad_sum: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor, offset: float, grad_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return grad_h (N, D), and grad_weight (D,), or empty if it is not needed."""
    n = h.to(rstd.dtype) * rstd[:, None]
    g = grad.to(rstd.dtype) * (offset + weight.to(rstd.dtype))
    grad_h = rstd[:, None] * (g - n * (g * n).mean(-1, keepdim=True))
    if grad_sum is not None:
        grad_h += grad_sum
    sums = (grad * n).sum(0).to(weight.dtype) if grad_weight else weight.new_empty(0)
    return grad_h.to(h.dtype).contiguous(), sums


rms_norm_fwd = custom_op(
    "rms_norm_fwd", rms_norm_fwd_cpu, rms_norm_fwd_triton,
    fake=lambda x, weight, residual, _, offset, round_once=False: new_results(x, weight, residual, offset, round_once),
)
rms_norm_bwd = custom_op(
    "rms_norm_bwd", rms_norm_bwd_cpu, rms_norm_bwd_triton,
    fake=lambda grad, _sum, h, weight, _rstd, _offset, needed: (
        h.new_empty(h.shape), weight.new_empty(weight.shape if needed else 0)),
)


class RMSNormFunction(torch.autograd.Function):
    """Maps rows (N, D) to (y, h), with h = residual + x, or x itself."""
    @staticmethod
    def forward(ctx, x, weight, residual, eps, offset, round_once):
        y, total, rstd = rms_norm_fwd(x, weight, residual, eps, offset, round_once)
        h = x if residual is None else total
        ctx.save_for_backward(h, weight, rstd)
        ctx.offset, ctx.has_residual = offset, residual is not None
        ctx.set_materialize_grads(False)
        return y, h

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_sum):
        h, weight, rstd = ctx.saved_tensors
        if grad is None:  # y was not used
            return grad_sum, None, grad_sum, None, None, None
        needs_weight = ctx.needs_input_grad[1]
        grad_h, grad_weight = rms_norm_bwd(grad, grad_sum, h, weight, rstd, ctx.offset, needs_weight)
        return grad_h, grad_weight if needs_weight else None, grad_h if ctx.has_residual else None, None, None, None


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, residual: Tensor | None = None, offset: float = 0.0,
    round_once: bool = False, with_sum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return y = x / rms(x) * (offset + weight) over the last dimension; with `residual` the pair (y, residual + x).

    With `with_sum` and no residual, the pair is (y, x). Who uses that x gets its gradient added by the norm's own
    backward pass, in its one launch.
    x and residual (..., D), D at most 65,536, share shape and dtype; weight (D,). With `residual`, residual + x is
    normalised. As in transformers, with offset 0 and without `round_once` x / rms(x) is rounded before the product, and
    a float32 weight makes y float32. Otherwise only y is rounded, to x's dtype.
    """
    check_numbers(eps=eps, offset=offset)
    check_arguments(x, weight, residual)
    if x.numel() == 0 or (x.device.type == "cpu" and not torch.is_grad_enabled()):
        found = rms_norm_ref(x, weight, eps, residual=residual, offset=offset, round_once=round_once)
        return (found, x) if with_sum and isinstance(found, Tensor) else found
    residual_rows = None if residual is None else residual.reshape(-1, x.shape[-1])
    y, total = RMSNormFunction.apply(x.reshape(-1, x.shape[-1]), weight, residual_rows, eps, offset, round_once)
    return (y.view(x.shape), total.view(x.shape)) if with_sum or residual is not None else y.view(x.shape)


def check_arguments(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    """Raise ValueError, with the expected and the given shapes and dtypes, for an argument that does not fit."""
    check_tensors({"residual": residual}, x=x, weight=weight)
    if x.ndim == 0 or not 0 < x.shape[-1] <= MAX_WIDTH:
        raise ValueError(f"expected x (..., D) with D from 1 to {MAX_WIDTH}; got {tuple(x.shape)}")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"expected weight {tuple(x.shape[-1:])} for x {tuple(x.shape)}; got {tuple(weight.shape)}")
    if not x.is_floating_point() or not weight.is_floating_point():
        raise ValueError(f"expected floating dtypes; got x {x.dtype}, weight {weight.dtype}")
    if weight.device != x.device:
        raise ValueError(f"expected one device; got x on {x.device}, weight on {weight.device}")
    if residual is not None and (residual.shape, residual.dtype, residual.device) != (x.shape, x.dtype, x.device):
        raise ValueError(f"expected residual like x, {tuple(x.shape)} {x.dtype} on {x.device}; got "
                         f"{tuple(residual.shape)} {residual.dtype} on {residual.device}")


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    forward = types_of(rms_norm_fwd_kernel, dtype, rstd_ptr="*fp32", eps="fp32", offset="fp32")
    backward = types_of(rms_norm_bwd_kernel, dtype, rstd_ptr="*fp32", partial_ptr="*fp32", offset="fp32")
    cases = []
    for width in (2**power for power in range(6, 15)):
        launch = launch_rule(width)
        cases += flagged(f"rms_norm_fwd {width}", rms_norm_fwd_kernel, forward, launch, ("HAS_RESIDUAL", "CAST_FIRST"))
        flags = ("HAS_GRAD_SUM", "HAS_GRAD_WEIGHT")
        cases += flagged(f"rms_norm_bwd {width}", rms_norm_bwd_kernel, backward, launch, flags)
    return cases
