"""Random problems for linear_divergence, and their values by whole logits, torch's kl_div and autograd."""

from typing import Any

import torch
from accuracy import ROUNDING, assert_as_accurate, in_float64
from torch import Tensor
from torch.nn.functional import kl_div

D, E, V, WIDER = 33, 17, 1003, 1030  # odd: padding would hide mistakes at the edges; E, WIDER: the teacher's
SUMMATION = 2e-5  # slack for summing V float32 terms in another order, relative to the largest value
DIFFERENCE = 1e-7  # of the slope: the gradient is a difference of numbers of its size, in float32
BETAS = (0.0, 0.1, 0.3, 0.5, 0.9, 1.0)
ONE, TWO = {}, {"heads": 2}  # heads
SHAPES: list[dict[str, Any]] = [
    ONE, TWO, TWO | {"temperature": 0.05}, {"temperature": 5.0}, {"logit_scale": 0.25, "temperature": 0.3},
    {"softcap": 5.0, "temperature": 0.05}, {"bias": True, "temperature": 1.3, "logit_scale": 2.0, "softcap": 3.0},
    TWO | {"bias": True, "softcap": 3.0, "teacher_logit_scale": 0.5},
    TWO | {"bias": True, "logit_scale": 2.0, "teacher_softcap": 4.0, "temperature": 0.7},
]


def problem(rows: int, dtype: torch.dtype, heads: int = 1, bias: bool = False, **options: Any) -> dict[str, Any]:
    """Arguments of linear_divergence: the teacher has the student's head, or another of other sizes."""
    generator = torch.Generator().manual_seed(rows)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)

    arguments: dict[str, Any] = {"student_hidden": randn(rows, D).requires_grad_()}
    arguments |= {"teacher_hidden": randn(rows, D if heads == 1 else E), "weight": randn(V, D, scale=1 / 3)}
    arguments |= {"bias": randn(V)} if bias else {}
    arguments |= {"teacher_weight": randn(WIDER, E, scale=1 / 2)} if heads == 2 else {}
    arguments |= {"teacher_bias": randn(WIDER)} if bias and heads == 2 else {}
    return arguments | options


def of_logits(student: Tensor, teacher: Tensor) -> dict[str, Any]:
    """Arguments whose logits are these (R, V), exactly."""
    hidden = torch.eye(len(student), dtype=student.dtype)
    return {"student_hidden": hidden.clone().requires_grad_(), "teacher_hidden": hidden, "weight": student.T,
            "teacher_weight": teacher.T}


def dense(
    student_hidden: Tensor, teacher_hidden: Tensor, weight: Tensor, teacher_weight: Tensor | None = None,
    beta: float = 1.0, temperature: float = 1.0, bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    logit_scale: float = 1.0, teacher_logit_scale: float = 1.0, softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> tuple[Tensor, ...]:
    """The four results by whole logits, in at least float32."""
    if teacher_weight is None:
        teacher_weight, teacher_bias, teacher_logit_scale, teacher_softcap = weight, bias, logit_scale, softcap
    dtype = torch.promote_types(student_hidden.dtype, torch.float32)

    def logits(hidden: Tensor, head: Tensor, offset: Tensor | None, scale: float, cap: float | None) -> Tensor:
        z = (hidden.to(dtype) @ head.to(dtype).T + (0 if offset is None else offset.to(dtype))) * scale
        z = z if cap is None else cap * torch.tanh(z / cap)
        return z[:, : min(len(weight), len(teacher_weight))] / temperature

    z = logits(student_hidden, weight, bias, logit_scale, softcap)
    teacher_z = logits(teacher_hidden, teacher_weight, teacher_bias, teacher_logit_scale, teacher_softcap)
    log_p, log_q = z.log_softmax(-1), teacher_z.log_softmax(-1)

    def kl(log_target: Tensor, log_other: Tensor) -> Tensor:
        return kl_div(log_other, log_target, log_target=True, reduction="none").sum(-1)

    if beta in (0, 1):
        divergence = kl(log_p, log_q) if beta else kl(log_q, log_p)
    else:
        shares = torch.tensor([1 - beta, beta], dtype=torch.float64).log().to(dtype)
        log_m = torch.stack((log_p + shares[0], log_q + shares[1])).logsumexp(0)
        divergence = beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)
    entropies = [torch.distributions.Categorical(logits=each).entropy() for each in (z, teacher_z)]
    return divergence, *entropies, (z.argmax(-1) == teacher_z.argmax(-1)).to(dtype)


def outcome(function: Any, arguments: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """The four results and the gradient of the student's hidden states, in float64."""
    results = function(**arguments, **options)
    grad = torch.randn(len(results[0]), generator=torch.Generator().manual_seed(3)).to(results[0])
    (gradient,) = torch.autograd.grad(results[0], arguments["student_hidden"], grad)
    names = "divergence", "entropy", "teacher_entropy", "agreement", "gradient"
    return {name: value.detach().double() for name, value in zip(names, (*results, gradient), strict=True)}


def assert_no_worse(
    arguments: dict[str, Any], ours: dict[str, Tensor], dtype: torch.dtype, cancels: float = 0.0
) -> None:
    """The accuracy rule for everything in `ours`, an outcome on `arguments`; the gradient may be off by `cancels`."""
    truth, same_dtype = outcome(dense, in_float64(arguments)), outcome(dense, arguments)
    for name, exact in truth.items():
        slack = SUMMATION
        if name == "gradient":
            slack += 3 * ROUNDING[dtype]  # factors, products, the result
            cancels = cancels or DIFFERENCE / arguments.get("temperature", 1.0)
            slack += cancels / max(exact.abs().max().item(), torch.finfo(dtype).tiny)
        assert_as_accurate(name, ours[name], same_dtype[name], exact, slack)
