"""Divergences of a student from a teacher, and their gradients, from some whole rows of both logits, in place.

    p = softmax(z) of the student, q of the teacher;  gap = log q - log p;  KL = the row's sum
    beta 0    q gap               gradient = (p - q) * slope
    beta 1    -p gap              gradient = p (-gap - KL(p || q)) * slope
    between   (1 - beta) p log(p / m) + beta q log(q / m)
              gradient = (1 - beta) p (log(p / m) - KL(p || m)) * slope

N rows, R of a chunk, V vocabulary; m = (1 - beta) p + beta q; z and slope as in `logits.py`. Let w be 1 - beta where
the gap is above 0, else beta, and t = log(1 + w (exp(-|gap|) - 1)). Then log(p / m) = -max(gap, 0) - t and log(q / m) =
min(gap, 0) - t keep their digits for any gap, and are 0 where p = q. The terms of beta 0 and 1 get p - q and q - p
added, whose sums are 0: then the first-order error of both normalizers cancels, and no term is negative.
"""

import torch
from torch import Tensor
from torch.linalg import vecdot

from lowmem_grpo.kernels.custom_op import addmm, custom_op, matmul_fp32
from lowmem_grpo.kernels.logits import (
    FLOOR,
    LogitShape,
    floor_,
    floored,
    kernels_take,
    new_logits,
    packed_gradient,
    row_statistics,
    shape_logits,
)
from lowmem_grpo.kernels.triton_utils import Launch, Variant, flagged, tl, triton, types_of

# One row per program, 4 entries per thread. MODE: forward KL, reverse KL, JSD
ROWS = [Launch({"BLOCK_V": 1024, "MODE": mode}, num_warps=8, num_stages=1) for mode in range(3)]
UNCAPPED = 2.0**60  # a softcap that changes nothing, for the side without one: dividing by it is exact
# On the CPU a chunk is compared in so many parts, unless they were smaller than this: what they allocate stays small.
PARTS, PART_SIZE = 32, 2**15


def forward_chunks(
    hidden: Tensor, teacher_hidden: Tensor, weight: Tensor, teacher_weight: Tensor | None, bias: Tensor | None,
    teacher_bias: Tensor | None, beta: float, temperature: float, scale: float, teacher_scale: float,
    softcap: float | None, teacher_softcap: float | None, chunk_rows: int, keep_gradient: bool,
    factors: Tensor | None = None, ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return divergence, entropy, the teacher's entropy and agreement as one tensor (4, N), and the gradient U (N, D)
    of the divergence in the dtype of hidden, empty unless `keep_gradient`. Without a `teacher_weight` one product with
    `weight` makes both logits, and `bias` is for both. With `factors` (N,), also return the gradients of the divergence
    times these: of weight and bias, or of the rows `ids` (n,) of weight, which rise; else empty tensors."""
    rows, vocabulary = len(hidden), min(len(head) for head in (weight, teacher_weight) if head is not None)
    of_head, of_bias = new_head_gradients(hidden, weight, bias, factors, ids)
    ids = ids if ids is None or vocabulary == len(weight) else ids[ids < vocabulary]
    weight = weight[:vocabulary]
    bias, teacher_bias = (None if part is None else part[:vocabulary]
                          for part in (bias, bias if teacher_weight is None else teacher_bias))
    buffer = new_logits(hidden, 2 * min(chunk_rows, rows), vocabulary)
    results = buffer.new_empty(4, rows)
    gradient = hidden.new_empty(hidden.shape if keep_gradient else 0)
    numbers = beta, temperature, scale, teacher_scale, softcap, teacher_softcap
    real = type(buffer) is Tensor  # a fake one has no parts
    compare = compare_rows if kernels_take(buffer) or not real else compare_rows_ref
    for start in range(0, rows, chunk_rows):
        chunk = slice(start, min(start + chunk_rows, rows))
        both = buffer[: 2 * (chunk.stop - start)]
        student, teacher = both.chunk(2)
        if teacher_weight is None:
            matmul_fp32(torch.cat((hidden[chunk], teacher_hidden[chunk])), weight.T, out=both)
        else:
            matmul_fp32(hidden[chunk], weight.T, out=student)
            matmul_fp32(teacher_hidden[chunk], teacher_weight[:vocabulary].T, out=teacher)
        results[:, chunk] = compare(student, teacher, bias, teacher_bias, *numbers,
                                    weight.dtype if keep_gradient or factors is not None else None)
        slopes = unpadded(student, teacher, weight.dtype) if keep_gradient or factors is not None else student
        if keep_gradient:
            addmm(gradient[chunk], slopes, weight, beta=0)
        if factors is not None:
            slopes = (slopes if ids is None else slopes[:, ids]).T.to(of_head.dtype)
            weighted = (hidden[chunk] * factors[chunk, None]).to(of_head.dtype)
            of_head[: len(slopes)].addmm_(slopes, weighted)
            if len(of_bias):
                of_bias[:vocabulary] += (slopes @ factors[chunk].to(slopes.dtype)).to(of_bias.dtype)
    return results, gradient, of_head, of_bias


def new_head_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, factors: Tensor | None, ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return zeros for the gradients of a head, or in float32 of its rows `ids`, and of its bias; empty without
    `factors`."""
    if factors is None:
        return hidden.new_empty(0), hidden.new_empty(0)
    of_head = torch.zeros_like(weight) if ids is None else factors.new_zeros(len(ids), weight.shape[1])
    return of_head, factors.new_zeros(0 if ids is not None or bias is None else len(bias))


def unpadded(logits: Tensor, free: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the `packed_gradient` of logits (R, V); on the CPU a 16-bit one without its padding, in the memory of
    `free` (R, V): oneDNN reads past the end of padded rows of odd length, and 0 * NaN is NaN."""
    gradient = packed_gradient(logits, dtype)
    if gradient.is_cuda or gradient.is_contiguous():
        return gradient
    return free.view(dtype).flatten()[: gradient.numel()].view_as(gradient).copy_(gradient)


def compare_rows_ref(
    student: Tensor, teacher: Tensor, bias: Tensor | None, teacher_bias: Tensor | None, beta: float,
    temperature: float, scale: float, teacher_scale: float, softcap: float | None, teacher_softcap: float | None,
    gradient_dtype: torch.dtype | None,
) -> Tensor:
    """Return (4, R): divergence, both entropies and agreement, of raw logits (R, V) of both, which are overwritten:
    the student's, with `gradient_dtype`, by the gradient in the layout of `packed_gradient`."""
    shape, teacher_shape = (LogitShape(temperature, *numbers)
                            for numbers in ((scale, softcap), (teacher_scale, teacher_softcap)))
    results = student.new_empty(4, len(student))
    size = max(1, -(-len(student) // PARTS), PART_SIZE // student.shape[1])
    for z, teacher_z, part in zip(student.split(size), teacher.split(size), results.split(size, 1), strict=True):
        log_p, maximum, token = log_probs_(shape.apply_(z, bias))
        log_q, _, teacher_token = log_probs_(teacher_shape.apply_(teacher_z, teacher_bias))
        p, q = log_p.exp(), log_q.exp()
        part[1], part[2], part[3] = -vecdot(p, log_p), -vecdot(q, log_q), token == teacher_token
        part[0], gradient = diverge(p, q, log_q.sub_(log_p), beta)
        if gradient_dtype is not None:
            packed_gradient(z, gradient_dtype).copy_(gradient.mul_(shape.slope_(z, maximum)))
    return results


def log_probs_(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Subtract from z (R, V) its maximum, in place; return log-probabilities (R, V), the maximum (R, 1), and the
    likeliest token (R,)."""
    maximum, token = floor_(z).max(-1, keepdim=True)
    return z.sub_(maximum).log_softmax(-1), maximum, token.squeeze(-1)


def diverge(p: Tensor, q: Tensor, gap: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the divergence (R,) of probabilities (R, V), and its gradient (R, V) with respect to z. Overwrites gap."""
    if beta == 0:
        gradient = p - q
        return (vecdot(q, gap) + gradient.sum(-1)).clamp_(min=0), gradient
    if beta == 1:
        mean = vecdot(p, gap)
        return ((q - p).sum(-1) - mean).clamp_(min=0), gap.sub_(mean[:, None]).neg_().mul_(p)
    most = 1 - torch.finfo(gap.dtype).eps  # so that 1 + w (0 - 1) stays above 0
    above, below = (gap.new_tensor(min(share, most)) for share in (1 - beta, beta))
    mixed = gap.abs().neg_().expm1_().mul_(torch.where(gap > 0, above, below)).log1p_()
    ratio = gap.clamp(min=0).add_(mixed).neg_()  # log(p / m)
    mean = vecdot(p, ratio)
    divergence = (1 - beta) * mean + beta * vecdot(q, gap.clamp_(max=0).sub_(mixed))
    return divergence.clamp_(min=0), ratio.sub_(mean[:, None]).mul_(p).mul_(1 - beta)


@triton.jit
def log_probs(row_ptr, columns, inside, row_max, log_sum, temperature, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return (z - max z, log-probabilities, slope) of a block of a row."""
    raw = tl.load(row_ptr + columns, mask=inside, other=0.0)
    z, slope = shape_logits(raw, 0.0, scale, softcap, temperature, HAS_SOFTCAP)
    shifted = tl.where(inside, floored(z) - row_max, FLOOR)
    return shifted, shifted - log_sum, slope


@triton.jit
def terms(log_p, log_q, beta, MODE: tl.constexpr):
    """Return (p, a, terms of the divergence) of a block; the gradient is a for the forward KL, else p (a - sum(p a)),
    for JSD times 1 - beta."""
    p, q, gap = tl.exp(log_p), tl.exp(log_q), log_q - log_p
    if MODE == 0:
        a = p - q
        value = q * gap + a
    elif MODE == 1:
        a = -gap
        value = (q - p) - p * gap
    else:
        share = tl.minimum(tl.where(gap > 0, 1.0 - beta, beta), 0.9999999)  # so that 1 + w (0 - 1) stays above 0
        mixed = tl.log(1.0 + share * (tl.exp(-tl.abs(gap)) - 1.0))
        a = -tl.maximum(gap, 0.0) - mixed
        value = (1.0 - beta) * (p * a) + beta * (q * (tl.minimum(gap, 0.0) - mixed))
    return p, a, value


@triton.jit
def first_best(best, place, V):
    """Return the smallest place of the largest value, from each lane's largest value and its first place."""
    return tl.min(tl.where(best == tl.max(best, 0), place, V), 0)


@triton.jit
def compare_rows_kernel(
    student_ptr, teacher_ptr, gradient_ptr, results_ptr, R, V, student_stride, teacher_stride, gradient_stride,
    beta, temperature, scale, teacher_scale, softcap, teacher_softcap,
    HAS_SOFTCAP: tl.constexpr, HAS_GRADIENT: tl.constexpr, BLOCK_V: tl.constexpr, MODE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    top, total, weighted = row_statistics(
        student_ptr, student_ptr, V, temperature, scale, softcap, False, HAS_SOFTCAP, BLOCK_V
    )
    teacher_top, teacher_total, teacher_weighted = row_statistics(
        teacher_ptr, teacher_ptr, V, temperature, teacher_scale, teacher_softcap, False, HAS_SOFTCAP, BLOCK_V
    )
    log_sum, teacher_log_sum = tl.log(total), tl.log(teacher_total)

    lanes = tl.arange(0, BLOCK_V)
    lane_mean, lane_value = tl.zeros((BLOCK_V,), tl.float32), tl.zeros((BLOCK_V,), tl.float32)
    best, teacher_best = tl.full((BLOCK_V,), FLOOR, tl.float32), tl.full((BLOCK_V,), FLOOR, tl.float32)
    place, teacher_place = lanes, lanes
    for start in range(0, V, BLOCK_V):
        columns = start + lanes
        inside = columns < V
        shifted, log_p, _ = log_probs(
            student_ptr, columns, inside, top, log_sum, temperature, scale, softcap, HAS_SOFTCAP
        )
        teacher_shifted, log_q, _ = log_probs(
            teacher_ptr, columns, inside, teacher_top, teacher_log_sum, temperature, teacher_scale, teacher_softcap,
            HAS_SOFTCAP,
        )
        p, a, value = terms(log_p, log_q, beta, MODE)
        lane_mean += p * a
        lane_value += value
        place = tl.where(shifted > best, columns, place)
        best = tl.maximum(best, shifted)
        teacher_place = tl.where(teacher_shifted > teacher_best, columns, teacher_place)
        teacher_best = tl.maximum(teacher_best, teacher_shifted)
    mean, divergence = tl.sum(lane_mean, 0), tl.sum(lane_value, 0)
    agrees = first_best(best, place, V) == first_best(teacher_best, teacher_place, V)
    tl.store(results_ptr + row, tl.where(divergence < 0, 0.0, divergence))
    tl.store(results_ptr + R + row, log_sum - weighted / total)
    tl.store(results_ptr + 2 * R + row, teacher_log_sum - teacher_weighted / teacher_total)
    tl.store(results_ptr + 3 * R + row, tl.where(agrees, 1.0, 0.0))

    if HAS_GRADIENT:
        gradient_ptr += row * gradient_stride
        for start in range(0, V, BLOCK_V):
            columns = start + lanes
            inside = columns < V
            _, log_p, slope = log_probs(
                student_ptr, columns, inside, top, log_sum, temperature, scale, softcap, HAS_SOFTCAP
            )
            tl.debug_barrier()  # see logprob_rows_kernel: a narrower result is written over bytes that all have read
            _, log_q, _ = log_probs(
                teacher_ptr, columns, inside, teacher_top, teacher_log_sum, temperature, teacher_scale,
                teacher_softcap, HAS_SOFTCAP,
            )
            p, a, _ = terms(log_p, log_q, beta, MODE)
            gradient = a if MODE == 0 else p * (a - mean)
            gradient = gradient * slope if MODE < 2 else gradient * slope * (1.0 - beta)
            tl.store(gradient_ptr + columns, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)


def compare_rows_triton(
    student: Tensor, teacher: Tensor, bias: Tensor | None, teacher_bias: Tensor | None, beta: float,
    temperature: float, scale: float, teacher_scale: float, softcap: float | None, teacher_softcap: float | None,
    gradient_dtype: torch.dtype | None,
) -> Tensor:
    """Launch the kernel, one program per row; return (4, R). A gradient, if wanted, overwrites the student's logits."""
    for logits, offset in ((student, bias), (teacher, teacher_bias)):
        if offset is not None:  # few heads have a bias: a pass of its own saves three fourths of the variants
            logits += offset
    rows, vocabulary = student.shape
    results = torch.empty(4, rows, dtype=student.dtype, device=student.device)
    gradient = packed_gradient(student, gradient_dtype or student.dtype)
    if rows:
        compare_rows_kernel[(rows,)](
            student, teacher, gradient, results, rows, vocabulary, student.stride(0), teacher.stride(0),
            gradient.stride(0), float(beta), float(temperature), float(scale), float(teacher_scale),
            float(softcap or UNCAPPED), float(teacher_softcap or UNCAPPED),
            HAS_SOFTCAP=bool(softcap or teacher_softcap), HAS_GRADIENT=gradient_dtype is not None,
            **ROWS[{0.0: 0, 1.0: 1}.get(beta, 2)].options,
        )
    return results


compare_rows = custom_op(
    "compare_rows", compare_rows_ref, compare_rows_triton, mutates=("student", "teacher"),
    fake=lambda student, *_: student.new_empty(4, len(student)),
)


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    numbers = ("beta", "temperature", "scale", "teacher_scale", "softcap", "teacher_softcap")
    wide = dict.fromkeys(("student_ptr", "teacher_ptr", "results_ptr"), "*fp32")
    types = types_of(compare_rows_kernel, dtype, **wide, **dict.fromkeys(numbers, "fp32"))
    return [variant for mode, launch in enumerate(ROWS)
            for variant in flagged(f"compare_rows {mode}", compare_rows_kernel, types, launch,
                                   ("HAS_SOFTCAP", "HAS_GRADIENT"))]
