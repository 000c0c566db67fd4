"""How far a student's next-token distributions are from a teacher's, from hidden states and heads, without the logits.

    beta 0    forward    KL(q || p)              p of the student, q of the teacher, both at the same temperature
    beta 1    reverse    KL(p || q)
    between   JSD        beta KL(q || m) + (1 - beta) KL(p || m),  m = (1 - beta) p + beta q

beta is that of TRL's DistillationTrainer; the divergence between is that of GKD (arXiv 2306.13649). N rows, D and E
hidden sizes, V vocabulary. Only a chunk of both logits exists at any time. As in `linear_logprobs.py`, the gradient
with respect to the hidden states does not depend on what follows, up to one factor a row:

    U = d divergence / d hidden = d W        d of `divergence_kernels.py`

so a forward pass that needs a gradient keeps U (N, D), and the backward pass is one row scaling: three matrix products
in all, where the teacher's is one. With one head for both, each part of the head is read once for both. If the head is
trained, or some of its rows are, the backward pass computes both logits again, chunk by chunk, and U with them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import (
    accumulator_dtype,
    check_numbers,
    custom_op,
    large_products,
    matmul_fp32,
    once_differentiable,
)
from lowmem_grpo.kernels.divergence_kernels import forward_chunks, new_head_gradients
from lowmem_grpo.kernels.linear_logprobs import check_head, default_rows
from lowmem_grpo.kernels.logits import LogitShape, new_logits


class Divergence(NamedTuple):
    """What `linear_divergence` returns, each (N,). Only the divergence has a gradient. Entropies are at the
    temperature, in nats; agreement is 1 where both have the same likeliest token, else 0."""

    divergence: Tensor
    entropy: Tensor
    teacher_entropy: Tensor
    agreement: Tensor


def linear_divergence_ref(
    student_hidden: Tensor, teacher_hidden: Tensor, weight: Tensor, teacher_weight: Tensor | None = None, *,
    beta: float = 1.0, temperature: float = 1.0, bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    logit_scale: float = 1.0, teacher_logit_scale: float | None = None, softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> Divergence:
    """Return the same in plain torch, with all logits in memory; differentiable by autograd, by the head as well."""
    own = bias, logit_scale, softcap
    theirs = teacher_head(teacher_weight, own, (teacher_bias, teacher_logit_scale, teacher_softcap))
    teacher_weight = weight if teacher_weight is None else teacher_weight
    common, dtype = min(len(weight), len(teacher_weight)), accumulator_dtype(student_hidden.dtype)

    def logits(hidden: Tensor, head: Tensor, offset: Tensor | None, scale: float, cap: float | None) -> Tensor:
        raw = hidden.to(dtype) @ head[:common].to(dtype).T
        z = (raw if offset is None else raw + offset[:common]) * scale
        return (cap * torch.tanh(z / cap) if cap else z) / temperature

    z, teacher_z = logits(student_hidden, weight, *own), logits(teacher_hidden, teacher_weight, *theirs).detach()
    log_p, log_q = (each.clamp(min=torch.finfo(dtype).min).log_softmax(-1) for each in (z, teacher_z))
    log_m = log_p if beta == 0 else log_q if beta == 1 else torch.logaddexp(
        log_p + torch.tensor(1 - beta, dtype=dtype).log(), log_q + torch.tensor(beta, dtype=dtype).log())
    forward, reverse = (log_q.exp() * (log_q - log_m)).sum(-1), (log_p.exp() * (log_p - log_m)).sum(-1)
    divergence = forward if beta == 0 else reverse if beta == 1 else beta * forward + (1 - beta) * reverse
    entropy, teacher_entropy = (-(each.exp() * each).sum(-1).detach() for each in (log_p, log_q))
    return Divergence(divergence, entropy, teacher_entropy, (z.argmax(-1) == teacher_z.argmax(-1)).to(dtype))


def linear_divergence(
    student_hidden: Tensor, teacher_hidden: Tensor, weight: Tensor, teacher_weight: Tensor | None = None, *,
    beta: float = 1.0, temperature: float = 1.0, bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    logit_scale: float = 1.0, teacher_logit_scale: float | None = None, softcap: float | None = None,
    teacher_softcap: float | None = None, chunk_rows: int | None = None, rows: tuple[Tensor, Tensor] | None = None,
) -> Divergence:
    """Return the divergence (N,) of each row with the entropies and agreement, in float32 (float64 for float64 input).

    student_hidden (N, D) and weight (V, D) share a floating dtype, teacher_hidden (N, E) and teacher_weight (V', E)
    another. Vocabularies of different sizes are compared on the rows that both have, and both softmaxes are over these
    alone. Without `teacher_weight` the student's head, with its bias, scale and softcap, is the teacher's too.

    student_hidden, weight and bias get gradients if they require them; a head's is summed over chunks in its own dtype.
    `rows` are the ids (n,) of trained rows of a frozen weight, which rise, and their values (n, D), which weight holds:
    the values get the gradient. `chunk_rows` rows of both logits exist at a time; the default suits the device.
    """
    numbers = {"beta": beta, "temperature": temperature, "logit_scale": logit_scale}
    optional = {"teacher_logit_scale": teacher_logit_scale, "softcap": softcap, "teacher_softcap": teacher_softcap}
    check_numbers(**numbers, **{name: value for name, value in optional.items() if value is not None})
    if not 0 <= beta <= 1:
        raise ValueError(f"beta is {beta}; it must be from 0 (forward KL) to 1 (reverse KL)")
    own = bias, logit_scale, softcap
    offset, scale, cap = teacher_head(teacher_weight, own, (teacher_bias, teacher_logit_scale, teacher_softcap))
    check_heads(student_hidden, teacher_hidden, weight, teacher_weight, bias, offset, temperature, chunk_rows)
    if teacher_weight is weight and offset is bias:
        teacher_weight = None
    offset = None if teacher_weight is None else offset
    if chunk_rows is None:
        chunk_rows = default_rows(student_hidden.device, (2 if student_hidden.is_cuda else 1) * len(weight))
    ids, values = rows or (None, None)
    learns, head = (torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in parts)
                    for parts in ((student_hidden,), (weight, bias, values)))
    with torch.autocast(student_hidden.device.type, enabled=False):
        return Divergence(*LinearDivergenceFunction.apply(
            student_hidden, teacher_hidden, weight, teacher_weight, bias, offset, float(beta), float(temperature),
            float(logit_scale), float(scale), softcap, cap, chunk_rows, ids, values, learns, head))


class LinearDivergenceFunction(torch.autograd.Function):
    """Forward: divergence, entropies, agreement and, if only the student needs a gradient, U. Backward: a row scaling.
    For a trained head (`head`), the backward pass computes the logits again, and all gradients."""

    @staticmethod
    def forward(ctx, *arguments):
        *given, ids, _values, learns, head = arguments
        results, gradient, *_ = by_chunks(*given, learns and not head)
        ctx.save_for_backward(*((*given[:6], ids) if head else (gradient,)))
        ctx.numbers = given[6:]
        divergence, *others = (row.clone() for row in results)
        ctx.mark_non_differentiable(*others)
        return divergence, *others

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_divergence, *_others):
        gradient, *others = ctx.saved_tensors
        grads: list[Any] = [None] * 17
        if others:
            smallest = grad_divergence.new_full((1,), torch.finfo(grad_divergence.dtype).tiny)  # a divisor above 0
            most = torch.cat([smallest, grad_divergence]).abs().amax()  # a mean over many tokens underflows in float16
            _, gradient, of_head, of_bias = by_chunks(*ctx.saved_tensors[:6], *ctx.numbers, ctx.needs_input_grad[0],
                                                      grad_divergence / most, others[-1])
            grads[2 if others[-1] is None else 14], grads[4] = of_head.mul_(most), of_bias.mul_(most)
        if ctx.needs_input_grad[0]:
            # the product is taken in fp32 and rounded once, straight into place
            grads[0] = torch.mul(gradient, grad_divergence[:, None], out=torch.empty_like(gradient))
        return tuple(grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad, strict=True))


def by_chunks(*arguments: Any) -> Any:
    forward: Any = forward_op if torch.compiler.is_compiling() else forward_chunks
    with large_products():
        return forward(*arguments)


def new_results(
    hidden: Tensor, teacher_hidden: Tensor, weight: Tensor, teacher_weight: Tensor | None, bias: Tensor | None,
    *others: Any,
) -> tuple[Tensor, ...]:
    keep_gradient, factors, ids = (*others, None, None)[8:11]
    return (new_logits(hidden, 4, len(hidden)), hidden.new_empty(hidden.shape if keep_gradient else 0),
            *new_head_gradients(hidden, weight, bias, factors, ids))


forward_op = custom_op("linear_divergence_fwd", forward_chunks, fake=new_results)  # keeps the loop out of graphs


def teacher_head(weight: Tensor | None, own: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the teacher's bias, scale and softcap. Raises ValueError if they are `given` for the student's head, and
    differ from its `own`."""
    if weight is not None:
        return given[0], 1.0 if given[1] is None else given[1], given[2]
    for name, mine, value in zip(("bias", "logit_scale", "softcap"), own, given, strict=True):
        if value is not None and value is not mine and (name == "bias" or value != mine):
            raise ValueError(f"teacher_{name} is given without teacher_weight: the teacher then has the student's head "
                             f"with its {name}. Leave teacher_{name} out, or give teacher_weight as well")
    return own


def check_heads(
    student_hidden: Tensor, teacher_hidden: Tensor, weight: Tensor, teacher_weight: Tensor | None, bias: Tensor | None,
    teacher_bias: Tensor | None, temperature: float, chunk_rows: int | None,
) -> None:
    """Raise ValueError, with the expected and the given shapes and dtypes, for an argument that does not fit."""
    check_head(student_hidden, weight, bias, temperature, chunk_rows, ("student_hidden", "weight", "bias"))
    check_head(teacher_hidden, weight if teacher_weight is None else teacher_weight, teacher_bias, temperature,
               chunk_rows, ("teacher_hidden", "weight" if teacher_weight is None else "teacher_weight", "teacher_bias"))
    student, teacher = (f"{tuple(each.shape)} {each.dtype} on {each.device}"
                        for each in (student_hidden, teacher_hidden))
    if (len(student_hidden) != len(teacher_hidden) or student_hidden.device != teacher_hidden.device
            or accumulator_dtype(student_hidden.dtype) != accumulator_dtype(teacher_hidden.dtype)):
        raise ValueError(f"expected as many rows of student_hidden and teacher_hidden, on one device, and both or "
                         f"neither in float64; got {student} and {teacher}")


@torch.no_grad()
def linear_topk(
    hidden: Tensor, weight: Tensor, k: int, *, bias: Tensor | None = None, temperature: float = 1.0,
    logit_scale: float = 1.0, softcap: float | None = None, chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (N, k) of the k likeliest tokens of each row, the likeliest first, in float32
    (float64 for float64 input), and their ids (N, k). Neither has a gradient. Arguments as of `linear_logprobs`."""
    check_numbers(k=k, temperature=temperature, logit_scale=logit_scale, softcap=0 if softcap is None else softcap)
    check_head(hidden, weight, bias, temperature, chunk_rows)
    if not isinstance(k, int) or not 1 <= k <= len(weight):
        raise ValueError(f"k is {k!r}; it must be a whole number from 1 to {len(weight)}, the size of the vocabulary")
    shape, rows = LogitShape(temperature, logit_scale, softcap), chunk_rows or default_rows(hidden.device, len(weight))
    buffer = new_logits(hidden, min(rows, len(hidden)), len(weight))
    logprobs, ids = new_logits(hidden, len(hidden), k), hidden.new_empty(len(hidden), k, dtype=torch.long)
    with torch.autocast(hidden.device.type, enabled=False), large_products():
        for some, found, places in zip(hidden.split(rows), logprobs.split(rows), ids.split(rows), strict=True):
            z = shape.apply_(matmul_fp32(some, weight.T, out=buffer[: len(some)]), bias)
            torch.topk(z, k, out=(found, places))
            found -= z.logsumexp(-1, keepdim=True)
    return logprobs, ids
