"""Random problems for linear_logprobs, and its outcome in float64."""

from collections.abc import Sequence
from typing import Any

import torch
from accuracy import ROUNDING, assert_as_accurate, in_float64
from torch import Tensor

from lowmem_grpo.kernels import linear_logprobs_ref

D, V = 33, 1003  # odd: padding would hide mistakes at the edges
SUMMATION = 2e-5  # slack for summing V float32 terms in another order than the reference, relative to the largest value
SHAPES = [
    {}, {"temperature": 0.7}, {"logit_scale": 0.25}, {"softcap": 5.0},
    {"bias": True, "temperature": 1.3, "logit_scale": 2.0, "softcap": 3.0},
]
COLD = [{"temperature": 0.01}, {"temperature": 0.01, "softcap": 30.0}, {"temperature": 1e-4}]  # z in the thousands
CHUNKS = [1, 7, None]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # of two float32 computations in another order


def problem(
    rows: int, dtype: torch.dtype, bias: bool = False, trained: Sequence[str] = ("hidden",), **options: Any
) -> tuple[dict[str, Any], Tensor]:
    """Arguments of linear_logprobs, those `trained` with gradients, and a gradient (N,) of logprobs."""
    generator = torch.Generator().manual_seed(rows)
    arguments = {
        "hidden": torch.randn(rows, D, generator=generator).to(dtype),
        "weight": (torch.randn(V, D, generator=generator) / 3).to(dtype),
        "targets": torch.randint(V, (rows,), generator=generator),
        "bias": torch.randn(V, generator=generator).to(dtype) if bias else None,
    }
    for name in trained:
        arguments[name].requires_grad_()
    return arguments | options, torch.randn(rows, generator=generator)


def outcome(
    function: Any, arguments: dict[str, Any], grad: Tensor, grad_entropy: Tensor | None = None, **options: Any
) -> dict[str, Tensor]:
    """logprobs, entropy and the gradient of every tensor that takes one, in float64."""
    trained = {name: value for name, value in arguments.items() if torch.is_tensor(value) and value.requires_grad}
    logprobs, entropy = function(**arguments, **options)
    loss = (logprobs * grad.to(logprobs)).sum()
    if grad_entropy is not None:
        loss = loss + (entropy * grad_entropy.to(entropy)).sum()
    grads = torch.autograd.grad(loss, list(trained.values()))
    results = {"logprobs": logprobs, "entropy": entropy}
    results |= {f"grad_{name}": value for name, value in zip(trained, grads, strict=True)}
    return {name: value.detach().double() for name, value in results.items()}


def assert_no_worse(arguments: dict[str, Any], ours: dict[str, Tensor], *grads: Tensor, dtype: torch.dtype) -> None:
    """The accuracy rule for everything in `ours`, an outcome on `arguments`."""
    truth = outcome(linear_logprobs_ref, in_float64(arguments), *grads)
    same_dtype = outcome(linear_logprobs_ref, arguments, *grads)
    for name, exact in truth.items():
        slack = SUMMATION + (3 * ROUNDING[dtype] if name.startswith("grad") else 0)  # factors, products, the result
        assert_as_accurate(name, ours[name], same_dtype[name], exact, slack)
