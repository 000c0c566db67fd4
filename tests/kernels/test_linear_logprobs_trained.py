"""linear_logprobs where more than the hidden states takes a gradient."""

from itertools import product
from typing import Any

import pytest
import torch
from accuracy import ROUNDING
from logprob_problem import CLOSE, COLD, SHAPES, D, V, assert_no_worse, outcome, problem
from memory import LiveStorage
from tables import every_row
from torch import Tensor

from lowmem_grpo.kernels import linear_logprobs

TRAINED = [
    {"trained": ["weight"]}, {"trained": ["hidden", "weight"]},
    {"trained": ["hidden", "weight", "bias"], "bias": True, "softcap": 3.0, "temperature": 1.3, "logit_scale": 2.0},
    {"trained": ["bias"], "bias": True}, {"trained": ["hidden", "weight", "bias"], "bias": True, "softcap": 5.0},
]


def entropy_gradient(rows: int) -> Tensor:
    return torch.randn(rows, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("options", TRAINED, ids=[" ".join(options["trained"]) for options in TRAINED])
@pytest.mark.every(2)
def test_gradients_of_a_trained_head_are_no_worse_than_the_references(options: dict[str, Any]) -> None:
    for dtype, (rows, chunk_rows) in product(ROUNDING, ((1, None), (63, 7), (500, 16))):
        arguments, grad = problem(rows, dtype, **options)
        ours = outcome(linear_logprobs, arguments, grad, chunk_rows=chunk_rows, return_entropy=True)
        assert_no_worse(arguments, ours, grad, dtype=dtype)


@every_row("options", [*SHAPES, *COLD, *TRAINED, TRAINED[1] | COLD[1]])
def test_gradients_of_an_entropy_bonus_are_no_worse_than_the_references(options: dict[str, Any]) -> None:
    for dtype in ROUNDING:
        arguments, grad = problem(63, dtype, **options)
        grads = grad, entropy_gradient(63)
        ours = outcome(linear_logprobs, arguments, *grads, chunk_rows=7, return_entropy=True, entropy_grad=True)
        assert_no_worse(arguments, ours, *grads, dtype=dtype)


def test_only_the_entropy_in_the_loss_gives_the_entropys_gradient() -> None:
    arguments, grad = problem(63, torch.float32)
    _, entropy = linear_logprobs(**arguments, return_entropy=True, entropy_grad=True)
    (alone,) = torch.autograd.grad(entropy.sum(), arguments["hidden"])
    both = outcome(linear_logprobs, arguments, 0 * grad, torch.ones(63), return_entropy=True, entropy_grad=True)
    torch.testing.assert_close(alone.double(), both["grad_hidden"], **CLOSE)


def test_ignored_rows_give_a_trained_head_no_gradient() -> None:
    arguments, grad = problem(63, torch.float32, **TRAINED[4])
    ignored = torch.arange(63) % 3 == 0
    kept = arguments | {"targets": arguments["targets"].masked_fill(ignored, -100)}
    ours = outcome(linear_logprobs, kept, grad, entropy_gradient(63), ignore_index=-100, return_entropy=True,
                   entropy_grad=True)
    expected = outcome(linear_logprobs, arguments, grad * ~ignored, entropy_gradient(63) * ~ignored,
                       return_entropy=True, entropy_grad=True)
    for name in [name for name in ours if name.startswith("grad")]:
        torch.testing.assert_close(ours[name], expected[name], **CLOSE, msg=name)


def test_small_gradients_of_a_loss_over_many_tokens_do_not_vanish_in_half_precision() -> None:
    arguments, grad = problem(63, torch.float16, trained=["hidden", "weight"])
    tiny = outcome(linear_logprobs, arguments, grad * 2**-14, return_entropy=True)["grad_weight"]
    whole = outcome(linear_logprobs, arguments, grad, return_entropy=True)["grad_weight"]
    lost = (tiny * 2**14 - whole).abs().max() / whole.abs().max()
    assert lost < 2**-8  # the result itself is a half-precision number near its smallest


@pytest.mark.parametrize("rows", [0, 63])
def test_gradient_of_zero_stays_zero(rows: int) -> None:
    arguments, grad = problem(rows, torch.float32, trained=["hidden", "weight"])
    ours = outcome(linear_logprobs, arguments, 0 * grad, return_entropy=True)
    assert ours["grad_weight"].shape == (V, D) and not ours["grad_weight"].any() and not ours["grad_hidden"].any()


def test_memory_of_a_trained_head_is_its_gradient_and_some_tiles() -> None:
    rows, chunk_rows = 500, 8
    arguments, _ = problem(rows, torch.bfloat16, trained=["hidden", "weight"])
    with LiveStorage() as storage:
        logprobs = linear_logprobs(**arguments, chunk_rows=chunk_rows)
        torch.autograd.grad(logprobs.sum(), [arguments["hidden"], arguments["weight"]])
    gradients = 2 * (V * D + rows * D) + 4 * rows * D  # bf16 results, float32 sum of hidden's
    assert storage.peak < gradients + 16 * chunk_rows * V + 2 * 4 * rows * D + 64 * rows
    assert storage.largest < rows * V


def test_the_gradient_of_a_trained_head_is_not_held_in_float32_for_few_rows() -> None:
    rows, chunk_rows = 2, 8
    arguments, _ = problem(rows, torch.bfloat16, trained=["weight"])
    with LiveStorage() as storage:
        torch.autograd.grad(linear_logprobs(**arguments, chunk_rows=chunk_rows).sum(), [arguments["weight"]])
    assert storage.peak < 2 * V * D + 2 * 4 * chunk_rows * V  # 4 V D more, were it one tile
