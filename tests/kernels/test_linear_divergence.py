"""linear_divergence and linear_topk against whole logits in float64, and the memory they take."""

from typing import Any

import pytest
import torch
from accuracy import ROUNDING, assert_as_accurate, in_float64
from divergence_problem import (
    BETAS,
    DIFFERENCE,
    ONE,
    SHAPES,
    SUMMATION,
    TWO,
    D,
    V,
    assert_no_worse,
    dense,
    of_logits,
    outcome,
    problem,
)
from memory import CountedOps, LiveStorage
from tables import every_row
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowmem_grpo.kernels import linear_divergence, linear_divergence_ref, linear_logprobs, linear_topk

EXACT = 1e-10  # of the largest value, in float64
CANCELLATION = 5e-6  # of the largest gap: numbers of its size cancel in the gradient, in float32


def assert_exact(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    for name, exact in truth.items():
        error = (ours[name] - exact).abs().max()
        assert error <= EXACT * exact.abs().max().clamp(min=1), f"{name}: {error}"


@pytest.mark.parametrize("function", [linear_divergence, linear_divergence_ref])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.every(3)
def test_values_and_gradients_are_those_of_whole_logits(beta: float, function: Any) -> None:
    for options in SHAPES:
        arguments = problem(63, torch.float64, beta=beta, **options)
        chunks = {"chunk_rows": 7} if function is linear_divergence else {}
        assert_exact(outcome(function, arguments, **chunks), outcome(dense, arguments))


SMALL = 1e-6  # what a mean over many tokens makes of the divergence's gradient


@pytest.mark.parametrize("options", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, *ROUNDING])
@pytest.mark.every(4)
def test_a_trained_head_its_bias_and_its_rows_have_the_gradients_of_whole_logits(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    ids = torch.tensor([0, 7, 8, 900, V - 1])  # a teacher of 950 tokens lacks the last one
    for beta, common in ((0.0, V), (0.3, 950), (1.0, V)):
        given = problem(63, dtype, beta=beta, **options)
        given |= {name: given[name][:common] for name in ("teacher_weight", "teacher_bias") if name in given}
        names = ["student_hidden", "weight", *(["bias"] if "bias" in given else [])]
        values = given["weight"][ids].to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        ours = gradients(linear_divergence, given, names, chunk_rows=7)
        (of_rows,) = gradients(linear_divergence, given | {"values": values}, ["values"], ids)
        usual, truth = (gradients(dense, with_teacher(some), names) for some in (given, in_float64(given)))
        whole = truth[1].clone().index_copy_(0, ids, of_rows.double())  # the other rows are exact
        cancels = DIFFERENCE * SMALL / options.get("temperature", 1.0)
        for name, mine, same, exact in zip([*names, "rows"], [*ours, whole], [*usual, usual[1]], [*truth, truth[1]],
                                           strict=True):
            slack = EXACT if dtype == torch.float64 else (
                SUMMATION + 5 * ROUNDING[dtype] + 63 * cancels / exact.abs().max().item())
            assert_as_accurate(name, mine, same, exact, slack)


def gradients(function: Any, given: dict[str, Any], names: list[str], ids: Any = None, **options: Any) -> list[Tensor]:
    """The gradients of these arguments, for small gradients of the divergence; `values` are those of rows `ids`."""
    leaves = {name: given[name].detach().clone().requires_grad_() for name in names}
    given = {name: part.detach() if torch.is_tensor(part) else part for name, part in given.items()} | leaves
    if ids is not None:
        given["rows"] = ids, given.pop("values")
    divergence = function(**given, **options)[0]
    upstream = SMALL * torch.randn(len(divergence), generator=torch.Generator().manual_seed(3))
    return list(torch.autograd.grad((divergence * upstream.to(divergence)).sum(), list(leaves.values())))


def with_teacher(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, where a head that is the student's too is given for the teacher once more."""
    names = "weight", "bias", "logit_scale", "softcap"
    shared = {} if "teacher_weight" in given else {f"teacher_{name}": given[name] for name in names if name in given}
    return given | shared


def extremes(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Logits of student and teacher."""
    noise, other = torch.randn(2, 40, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    tokens = torch.arange(40)
    likeliest = torch.zeros(40, V, dtype=torch.float64).index_put((tokens, 3 * tokens), torch.tensor(1e4).double())
    halves = torch.where(torch.arange(V) < V // 2, 0.0, -1e4)
    found = {
        "one token each, the same": (noise + likeliest, other + likeliest),
        "one token each, another": (noise + likeliest, other + likeliest.roll(1, 1)),
        "one token against all": (noise + likeliest, other), "all against one token": (noise, other + likeliest),
        "disjoint": (noise + halves, other - 1e4 - halves), "far from 0": (noise + 1e4, other - 1e4),
    }
    return {name: (student.to(dtype), teacher.to(dtype)) for name, (student, teacher) in found.items()}


@every_row("beta", BETAS)
def test_extreme_logits_give_the_values_and_gradients_of_whole_logits(beta: float) -> None:
    for dtype in (torch.float64, torch.float32):
        for name, logits in extremes(dtype).items():
            for temperature in (0.05, 1.0, 5.0):
                arguments = of_logits(*logits) | {"beta": beta, "temperature": temperature}
                ours = outcome(linear_divergence, arguments)
                assert all(values.isfinite().all() for values in ours.values()), name
                if dtype == torch.float64:
                    assert_exact(ours, outcome(dense, arguments))
                else:
                    largest = (logits[0] - logits[1]).abs().max().item() / temperature
                    assert_no_worse(arguments, ours, dtype, CANCELLATION * largest)


@every_row("beta", BETAS)
def test_equal_distributions_have_no_divergence_and_no_gradient(beta: float) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for name, (logits, other) in extremes(dtype).items():
            for each in (logits, other):
                ours = outcome(linear_divergence, of_logits(each, each), beta=beta)
                assert not ours["divergence"].any() and not ours["gradient"].any(), name
                assert ours["agreement"].all() and torch.equal(ours["entropy"], ours["teacher_entropy"])


@every_row("beta", BETAS)
def test_small_divergences_keep_their_digits_and_are_never_negative(beta: float) -> None:
    """Normalizers of float32 are off by 4e-7, more than the divergence of a teacher that is the student's average."""
    noise, other = (each.float() for each in torch.randn(2, 500, V, generator=torch.Generator().manual_seed(0)))
    for apart in (1e-3, 1e-5):
        arguments = of_logits(noise, noise + apart * other) | {"beta": beta}
        ours, truth = outcome(linear_divergence, arguments), outcome(dense, in_float64(arguments))
        assert (ours["divergence"] >= 0).all()
        assert (ours["divergence"] - truth["divergence"]).abs().max() < 3e-8
        error = (ours["gradient"] - truth["gradient"]).abs().max() / truth["gradient"].abs().max()
        assert error < 5e-6 / apart


@pytest.mark.parametrize("options", SHAPES)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.every(3)
def test_errors_are_no_larger_than_those_of_whole_logits(dtype: torch.dtype, options: dict[str, Any]) -> None:
    for rows, chunk_rows, beta in ((1, None, 0.0), (63, 1, 0.3), (63, 7, 1.0), (200, None, 0.9), (200, 64, 0.0)):
        arguments = problem(rows, dtype, beta=beta, **options)
        assert_no_worse(arguments, outcome(linear_divergence, arguments, chunk_rows=chunk_rows), dtype)


def test_tokens_that_only_one_of_both_has_do_not_exist() -> None:
    arguments = problem(63, torch.float32, heads=2, bias=True, beta=0.3)
    expected = outcome(linear_divergence, arguments)
    arguments["teacher_weight"][V:], arguments["teacher_bias"][V:] = 1e9, torch.nan
    assert all(torch.equal(values, expected[name]) for name, values in outcome(linear_divergence, arguments).items())
    narrower = {name: part[:900] for name, part in arguments.items() if name.startswith("teacher_") and part.ndim < 3
                and name != "teacher_hidden"}
    cut = arguments | narrower
    assert_no_worse(cut, outcome(linear_divergence, cut), torch.float32)


def test_a_logit_of_minus_infinity_of_both_has_no_weight() -> None:
    student, teacher = extremes(torch.float64)["one token against all"]
    cut = torch.arange(V) % 2 == 1
    for beta in BETAS:
        half = outcome(linear_divergence, of_logits(student[:, ~cut], teacher[:, ~cut]), beta=beta)
        bias = torch.zeros(V, dtype=torch.float64).masked_fill(cut, -torch.inf)
        whole = of_logits(student, teacher) | {"bias": bias, "teacher_bias": bias}
        whole["weight"] = student.masked_fill(cut, 0).T
        assert_exact(outcome(linear_divergence, whole, beta=beta), half)


def test_the_students_head_given_twice_is_one_head() -> None:
    arguments = problem(63, torch.float32, bias=True, beta=0.5, softcap=3.0)
    twice = arguments | {"teacher_weight": arguments["weight"], "teacher_bias": arguments["bias"],
                         "teacher_softcap": 3.0}
    ours = outcome(linear_divergence, twice)
    assert all(torch.equal(values, ours[name]) for name, values in outcome(linear_divergence, arguments).items())


@every_row(("options", "products"), [(ONE, 2), (TWO, 3)])
def test_one_head_is_read_once_for_both(options: dict[str, Any], products: int) -> None:
    with CountedOps() as counted:
        linear_divergence(**problem(63, torch.float32, **options))
    assert counted.names.count("aten::mm") == products


def test_no_rows_give_no_results() -> None:
    ours = outcome(linear_divergence, problem(0, torch.float32))
    assert ours.pop("gradient").shape == (0, D) and all(values.shape == (0,) for values in ours.values())


def test_only_the_students_hidden_states_get_a_gradient() -> None:
    arguments = problem(3, torch.bfloat16, heads=2, bias=True)
    for name in ("teacher_hidden", "teacher_weight", "teacher_bias"):
        arguments[name].requires_grad_()
    results = linear_divergence(**arguments)
    assert [each.requires_grad for each in results] == [True, False, False, False]
    assert all(each.dtype == torch.float32 for each in results)
    results.divergence.sum().backward()
    assert [name for name, each in arguments.items() if each.grad is not None] == ["student_hidden"]
    arguments["weight"].requires_grad_()  # a trainable head is fine where no gradient is taken
    with torch.no_grad():
        same = linear_divergence(**arguments)
    assert not same.divergence.requires_grad and torch.equal(same.divergence, results.divergence)


def test_autocast_around_the_call_changes_nothing() -> None:
    arguments = problem(63, torch.float32)
    expected = outcome(linear_divergence, arguments)
    with torch.autocast("cpu", torch.bfloat16):
        ours = outcome(linear_divergence, arguments)
    assert all(torch.equal(values, expected[name]) for name, values in ours.items())


def peak_bytes(function: Any, hidden: Tensor, *others: Tensor, **options: Any) -> int:
    """The most bytes alive at once in forward and backward."""
    with LiveStorage() as storage:
        results = function(hidden, *others, return_entropy=True, **options) if function is linear_logprobs else \
            function(hidden, *others, **options)
        torch.autograd.grad(results[0].sum(), hidden)
    return storage.peak


@pytest.mark.parametrize(("rows", "chunk_rows", "dtype"), [
    (300, None, torch.float32), (300, None, torch.bfloat16), (150, 60, torch.bfloat16), (150, 60, torch.float32),
])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.every(4)
def test_the_peak_is_near_that_of_log_probabilities(
    rows: int, chunk_rows: int | None, dtype: torch.dtype, heads: int, beta: float
) -> None:
    hidden, teacher_hidden = torch.randn(2, rows, 64).to(dtype)
    weights = torch.randn(heads, 20011, 64).to(dtype).unbind()
    hidden.requires_grad_()
    options = {"chunk_rows": chunk_rows}
    plain = peak_bytes(linear_logprobs, hidden, weights[0], torch.zeros(rows, dtype=torch.long), **options)
    assert peak_bytes(linear_divergence, hidden, teacher_hidden, *weights, beta=beta, **options) <= 1.3 * plain


def test_memory_stays_bounded_where_logits_would_take_two_hundred_gigabytes() -> None:
    rows, size, vocabulary, chunk_rows = 163_840, 4096, 151_936, 2048
    with FakeTensorMode():
        hidden = torch.empty(2, rows, size, dtype=torch.bfloat16).unbind()
        weight = torch.empty(vocabulary, size, dtype=torch.bfloat16)
        peak = peak_bytes(linear_divergence, hidden[0].requires_grad_(), hidden[1], weight, chunk_rows=chunk_rows)
    assert peak < 3 * rows * size * 2 + 10 * chunk_rows * vocabulary


@pytest.mark.parametrize("trained", [False, True])
def test_one_matrix_of_the_size_of_hidden_is_kept_for_backward_or_nothing(trained: bool) -> None:
    arguments = problem(500, torch.bfloat16)
    arguments["student_hidden"].requires_grad_(trained)
    with LiveStorage() as storage:
        results = linear_divergence(**arguments, chunk_rows=7)
    assert results.divergence.requires_grad == trained
    kept = arguments["student_hidden"].nbytes if trained else 0
    assert storage.live == sum(each.nbytes for each in results) + kept


@pytest.mark.parametrize("chunk_rows", [7, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.every(2)
def test_the_likeliest_tokens_are_those_of_whole_logits(dtype: torch.dtype, chunk_rows: int | None) -> None:
    arguments = problem(63, dtype, bias=True)
    hidden, weight, bias = (arguments[name] for name in ("student_hidden", "weight", "bias"))
    options = {"temperature": 0.7, "logit_scale": 2.0, "softcap": 5.0}
    logits = 5 * torch.tanh((hidden.double() @ weight.double().T + bias) * 2 / 5) / 0.7
    for k in (1, 100, V):
        found, ids = linear_topk(hidden, weight, k, bias=bias, chunk_rows=chunk_rows, **options)
        expected = logits.detach().log_softmax(-1).topk(k)
        close = {"rtol": 0, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 2e-5}
        torch.testing.assert_close(found.double(), expected.values, **close)
        assert not found.requires_grad and ids.dtype == torch.long and ids.shape == found.shape == (63, k)
        if dtype == torch.float64:
            assert torch.equal(ids, expected.indices)
    assert [each.shape for each in linear_topk(hidden[:0], weight, 5)] == [(0, 5)] * 2


def test_the_likeliest_tokens_are_found_without_all_logits() -> None:
    hidden, weight = torch.randn(1000, 64), torch.randn(5003, 64)
    with LiveStorage() as storage:
        linear_topk(hidden, weight, 20, chunk_rows=50)
    assert storage.peak < 2.2 * 50 * 5003 * 4 + 1000 * 20 * 12
