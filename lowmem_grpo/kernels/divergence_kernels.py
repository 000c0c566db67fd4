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

from lowmem_grpo.kernels.custom_op import custom_op, matmul_fp32
from lowmem_grpo.kernels.logits import LogitShape, floor_, kernels_take, new_logits, packed_gradient

PARTS = 32  # on the CPU a chunk is compared in so many parts: what they allocate is small, and stays in the cache


def forward_chunks(
    hidden: Tensor, teacher_hidden: Tensor, weight: Tensor, teacher_weight: Tensor | None, bias: Tensor | None,
    teacher_bias: Tensor | None, beta: float, temperature: float, scale: float, teacher_scale: float,
    softcap: float | None, teacher_softcap: float | None, chunk_rows: int, keep_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return divergence, entropy, the teacher's entropy and agreement as one tensor (4, N), and the gradient U (N, D)
    of the divergence in the dtype of hidden, empty unless `keep_gradient`. Without a `teacher_weight` one product with
    `weight` makes both logits."""
    rows, vocabulary = len(hidden), min(len(head) for head in (weight, teacher_weight) if head is not None)
    weight = weight[:vocabulary]
    bias, teacher_bias = (None if part is None else part[:vocabulary] for part in (bias, teacher_bias))
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
                                    weight.dtype if keep_gradient else None)
        if keep_gradient:
            torch.mm(unpadded(student, teacher, weight.dtype), weight, out=gradient[chunk])
    return results, gradient


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
    size = max(1, -(-len(student) // PARTS))
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


compare_rows = custom_op("compare_rows", compare_rows_ref, mutates=("student", "teacher"),
                         fake=lambda student, *_: student.new_empty(4, len(student)))
