"""The Triton kernel under linear_divergence in the interpreter, its ops under torch.compile, and both on a card."""

from functools import partial
from typing import Any

import pytest
import torch
from accuracy import ROUNDING, assert_as_accurate, interpreted
from card import gpu
from divergence_problem import BETAS, DIFFERENCE, SHAPES, SUMMATION, assert_no_worse, outcome, problem
from tables import pairwise
from torch import Tensor

from lowmem_grpo.kernels import linear_divergence, linear_logprobs
from lowmem_grpo.kernels.divergence_kernels import (
    compare_rows,
    compare_rows_ref,
    compare_rows_triton,
)
from lowmem_grpo.kernels.linear_divergence import forward_op

# of temperature, scale, teacher's scale, softcap, teacher's softcap
NUMBERS = [(1.0, 1.0, 1.0, None, None), (0.05, 1.0, 1.0, None, None), (5.0, 2.0, 0.5, None, 4.0),
           (0.7, 1.0, 2.0, 3.0, None), (1.3, 1.0, 1.0, 30.0, 20.0)]
SIZES = [(1, 2500), (13, 1003), (7, 130), (3, 4099)]  # rows, vocabulary: never a multiple of a block


def logits_of(rows: int, vocabulary: int, cut: bool = True) -> dict[str, Tensor]:
    """Random raw logits (R, V) of both, biases of which one entry is -inf (`cut`)."""
    generator = torch.Generator().manual_seed(rows)
    student, teacher = 4 * torch.randn(2, rows, vocabulary, generator=generator)
    bias, teacher_bias = torch.randn(2, vocabulary, generator=generator)
    if cut:
        bias[0] = teacher_bias[0] = -torch.inf
    return {"student": student, "teacher": teacher, "bias": bias, "teacher_bias": teacher_bias}


def results_of(function: Any, given: dict[str, Tensor], *rest: Any, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """All that a function of rows returns and writes, run on copies."""
    copies = {name: value.clone() for name, value in given.items()}
    results = function(*copies.values(), *rest, dtype)
    student = copies["student"]
    gradient = student if dtype in (None, student.dtype) else student.view(dtype)[:, : student.shape[1]]
    names = "divergence", "entropy", "teacher_entropy", "agreement"
    return dict(zip(names, results, strict=True)) | ({"gradient": gradient} if dtype else {})


@interpreted
@pytest.mark.parametrize(*pairwise(size=SIZES, numbers=NUMBERS, beta=BETAS, packing=[torch.float32, torch.float16]))
@pytest.mark.every(3)
def test_the_kernel_is_as_accurate_as_its_reference(
    size: tuple[int, int], numbers: tuple[Any, ...], beta: float, packing: torch.dtype
) -> None:
    both_or_none = (numbers[3] is None) == (numbers[4] is None)  # a softcap makes -inf finite
    given = logits_of(*size, cut=both_or_none)
    ours = results_of(compare_rows_triton, given, beta, *numbers, dtype=packing)
    reference = results_of(compare_rows_ref, given, beta, *numbers, dtype=torch.float32)
    wide = {name: value.double() for name, value in given.items()}
    for name, truth in results_of(compare_rows_ref, wide, beta, *numbers, dtype=torch.float64).items():
        assert ours[name].isfinite().all()
        slack = SUMMATION
        if name == "gradient":
            slack += ROUNDING[packing] + DIFFERENCE * numbers[1] / numbers[0] / truth.abs().max().item()
        assert_as_accurate(name, ours[name], reference[name], truth, slack)


@interpreted
def test_without_a_gradient_the_kernel_gives_the_same_values() -> None:
    given = logits_of(3, 1500)
    for beta in (0.0, 0.3, 1.0):
        plain = results_of(compare_rows_triton, given, beta, *NUMBERS[2], dtype=None)
        ours = results_of(compare_rows_triton, given, beta, *NUMBERS[2], dtype=torch.float32)
        assert all(torch.equal(values, ours[name]) for name, values in plain.items())


@interpreted
def test_the_kernel_gives_nothing_for_equal_rows_and_the_limits_for_disjoint_ones() -> None:
    given = logits_of(4, 2500)
    given["bias"], given["teacher_bias"] = torch.zeros(2, 2500)
    given["student"][:2] = given["teacher"][:2]
    given["student"][2:, 1000:], given["teacher"][2:, :1000] = -1e4, -1e4
    for beta in BETAS:
        ours = results_of(compare_rows_triton, given, beta, *NUMBERS[0], dtype=torch.float32)
        assert not ours["divergence"][:2].any() and not ours["gradient"][:2].any()
        assert ours["agreement"].tolist() == [1, 1, 0, 0]
        shares = torch.tensor([beta, 1 - beta])
        limit, near = (1e4, 1e-2) if beta in (0, 1) else (-(shares * shares.log()).sum().item(), 1e-5)
        torch.testing.assert_close(ours["divergence"][2:], torch.full((2,), limit), rtol=near, atol=0)


@interpreted
def test_a_logit_that_is_nan_makes_its_row_nan() -> None:
    for part in ("student", "teacher"):
        for beta in (0.0, 0.3, 1.0):
            given = logits_of(3, 1500)
            given[part][1, 700] = torch.nan
            ours = results_of(compare_rows_triton, given, beta, *NUMBERS[0], dtype=torch.float32)
            assert ours["divergence"].isnan().tolist() == [False, True, False]
            assert ours["gradient"].isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ops_keep_torchs_contract(dtype: torch.dtype) -> None:
    for beta in (0.0, 0.3, 1.0):
        torch.library.opcheck(compare_rows, (*logits_of(7, 130).values(), beta, *NUMBERS[3], dtype))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("keep_gradient", [False, True])
def test_whole_ops_keep_torchs_contract(keep_gradient: bool, heads: int) -> None:
    names = ("student_hidden", "teacher_hidden", "weight", "teacher_weight", "bias", "teacher_bias")
    given = problem(7, torch.float32, heads=heads, bias=True)
    given["student_hidden"].requires_grad_(False)
    called = (*map(given.get, names), 0.3, *NUMBERS[3], 3, keep_gradient)
    for more in ((), (torch.ones(7),), (torch.ones(7), torch.tensor([1, 5]))):
        torch.library.opcheck(forward_op, (*called, *more))


@pytest.mark.parametrize("options", SHAPES[::3])
@pytest.mark.every(2)
def test_compiled_calls_give_what_eager_ones_give(options: dict[str, Any]) -> None:
    compiled = torch.compile(linear_divergence, backend="aot_eager", fullgraph=True)
    for beta in (0.0, 0.3):
        arguments = problem(63, torch.float32, beta=beta, **options)
        expected = outcome(linear_divergence, arguments, chunk_rows=7)
        for name, values in outcome(compiled, arguments, chunk_rows=7).items():
            torch.testing.assert_close(values, expected[name], msg=name)


def test_a_compiled_call_gives_a_trained_head_its_gradient() -> None:
    arguments = problem(63, torch.float32, heads=2, bias=True)
    arguments["weight"].requires_grad_()
    functions = torch.compile(linear_divergence, backend="aot_eager", fullgraph=True), linear_divergence
    torch.testing.assert_close(*(torch.autograd.grad(function(**arguments, chunk_rows=7).divergence.sum(), arguments[
        "weight"])[0] for function in functions))


@gpu
@pytest.mark.parametrize(*pairwise(
    dtype=[torch.float32, torch.bfloat16, torch.float16], beta=BETAS, rows=[1, 63, 500], options=SHAPES,
))
def test_on_a_card_errors_are_no_larger_than_those_of_whole_logits(
    dtype: torch.dtype, beta: float, rows: int, options: dict[str, Any]
) -> None:
    arguments = problem(rows, dtype, beta=beta, **options)
    on_card = {name: value.detach().cuda().requires_grad_(value.requires_grad) if torch.is_tensor(value) else value
               for name, value in arguments.items()}
    ours = outcome(linear_divergence, on_card, chunk_rows=100)
    assert_no_worse(arguments, {name: value.cpu() for name, value in ours.items()}, dtype)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_card_two_runs_are_equal_bit_for_bit(dtype: torch.dtype) -> None:
    """A race between reading logits and writing the gradient over them would show here."""
    hidden = torch.randn(2, 512, 256, device="cuda", dtype=dtype)
    weight = torch.randn(50021, 256, device="cuda", dtype=dtype)
    student = hidden[0].clone().requires_grad_()
    runs = []
    for _ in range(3):
        results = linear_divergence(student, hidden[1], weight, beta=0.5)
        runs.append((*results, *torch.autograd.grad(results.divergence.sum(), student)))
    for run in runs[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(run, runs[0], strict=True))


@gpu
def test_on_a_card_the_peak_is_near_that_of_log_probabilities() -> None:
    hidden, weight = torch.randn(2, 4096, 64, device="cuda").half(), torch.randn(151_936, 64, device="cuda").half()
    student, targets = hidden[0].clone().requires_grad_(), torch.zeros(4096, dtype=torch.long, device="cuda")

    def divergence(teacher: Tensor, *given: Tensor) -> Tensor:
        return linear_divergence(given[0], teacher, given[1]).divergence

    peaks = []
    for call in (partial(linear_logprobs, targets=targets), partial(divergence, hidden[1])):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(call(student, weight).sum(), student)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 1.3 * peaks[0]
