"""linear_logprobs against float64 truth, and the memory it takes."""

from typing import Any

import pytest
import torch
from accuracy import ROUNDING, in_float64
from logprob_problem import CHUNKS, CLOSE, COLD, SHAPES, D, V, assert_no_worse, outcome, problem
from memory import LiveStorage
from tables import every_row
from torch._subclasses.fake_tensor import FakeTensorMode

from lowmem_grpo.kernels import linear_logprobs, linear_logprobs_ref
from lowmem_grpo.kernels.linear_logprobs import CPU_CHUNK_BYTES


@pytest.mark.parametrize("options", [*SHAPES, *COLD])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.every(2)
def test_errors_are_no_larger_than_the_references(dtype: torch.dtype, options: dict[str, Any]) -> None:
    for rows, chunk_rows in ((1, 1), (1, 7), (1, None), (63, 1), (63, 7), (63, None), (500, 7), (500, None)):
        arguments, grad = problem(rows, dtype, **options)
        ours = outcome(linear_logprobs, arguments, grad, chunk_rows=chunk_rows, return_entropy=True)
        assert_no_worse(arguments, ours, grad, dtype=dtype)


@every_row("chunk_rows", CHUNKS)
@every_row("every", [1, 3])  # row, or third row
def test_ignored_rows_give_zero_and_no_gradient(chunk_rows: int | None, every: int) -> None:
    arguments, grad = problem(63, torch.float32)
    kept = outcome(linear_logprobs, arguments, grad, return_entropy=True)
    ignored = torch.arange(63) % every == 0
    arguments["targets"] = arguments["targets"].masked_fill(ignored, -100)
    ours = outcome(linear_logprobs, arguments, grad, return_entropy=True, ignore_index=-100, chunk_rows=chunk_rows)
    for name, values in ours.items():
        assert not values[ignored].any(), name
        torch.testing.assert_close(values[~ignored], kept[name][~ignored], **CLOSE, msg=name)


@pytest.mark.parametrize("function", [linear_logprobs, linear_logprobs_ref])
def test_tokens_with_a_logit_of_minus_infinity_have_no_weight(function: Any) -> None:
    arguments, grad = problem(63, torch.float64)
    cut = torch.arange(V) % 2 == 1
    arguments["bias"] = torch.zeros(V, dtype=torch.float64).masked_fill(cut, -torch.inf)
    arguments["targets"] = arguments["targets"] // 2 * 2
    options = {"return_entropy": True} if function is linear_logprobs else {}
    ours = outcome(function, arguments, grad, **options)
    half = arguments | {"weight": arguments["weight"][~cut], "targets": arguments["targets"] // 2, "bias": None}
    for name, values in outcome(linear_logprobs_ref, half, grad).items():
        torch.testing.assert_close(ours[name], values, msg=name)


def test_a_target_with_probability_zero_is_minus_infinity() -> None:
    arguments, _ = problem(3, torch.float32)
    arguments["bias"] = torch.zeros(V)
    arguments["bias"][arguments["targets"][0]] = -torch.inf
    logprobs = linear_logprobs(**arguments)
    assert logprobs[0] == -torch.inf and logprobs[1:].isfinite().all()


def test_entropy_keeps_its_digits_at_a_large_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    arguments = {
        "hidden": torch.randn(63, 32, generator=generator), "targets": torch.zeros(63, dtype=torch.long),
        "weight": torch.randn(32771, 32, generator=generator) / 6,
    }
    _, exact = linear_logprobs_ref(**in_float64(arguments))
    _, entropy = linear_logprobs(**arguments, return_entropy=True)
    assert (entropy - exact).abs().max() < 2e-6 * exact.abs().max()


def test_no_rows_give_no_results() -> None:
    arguments, grad = problem(0, torch.float32)
    ours = outcome(linear_logprobs, arguments, grad, return_entropy=True)
    assert ours["logprobs"].shape == ours["entropy"].shape == (0,) and ours["grad_hidden"].shape == (0, D)


def test_results_are_float32_without_gradients_too_and_the_entropy_has_none() -> None:
    arguments, _ = problem(3, torch.bfloat16)
    logprobs, entropy = linear_logprobs(**arguments, return_entropy=True)
    assert logprobs.requires_grad and not entropy.requires_grad
    arguments["weight"].requires_grad_()  # a trainable head is fine where no gradient is taken
    with torch.no_grad():
        same = linear_logprobs(**arguments)
    assert same.dtype == torch.float32 and not same.requires_grad and torch.equal(same, logprobs.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_around_the_call_changes_nothing(dtype: torch.dtype) -> None:
    arguments, grad = problem(63, dtype)
    expected = outcome(linear_logprobs, arguments, grad, return_entropy=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours = outcome(linear_logprobs, arguments, grad, return_entropy=True)
    for name, values in expected.items():
        torch.testing.assert_close(ours[name], values, **CLOSE, msg=name)


def peak_bytes(arguments: dict[str, Any], backward: bool = True, **options: Any) -> int:
    """The most bytes alive at once in forward and backward."""
    with LiveStorage() as storage:
        logprobs = linear_logprobs(**arguments, **options)
        if backward:
            torch.autograd.grad(logprobs.sum(), arguments["hidden"])
    return storage.peak


@pytest.mark.parametrize(("rows", "size", "vocabulary", "chunk_rows"), [
    (500, D, V, 7), (63, D, V, 1), (1000, 300, 5003, 10), (4096, 64, V, 64), (4096, 64, 5003, None),
])
@pytest.mark.every(2)
def test_logits_of_all_rows_never_exist(rows: int, size: int, vocabulary: int, chunk_rows: int | None) -> None:
    arguments = {
        "hidden": torch.randn(rows, size, requires_grad=True), "weight": torch.randn(vocabulary, size),
        "targets": torch.zeros(rows, dtype=torch.long),
    }
    chunk = 4 * chunk_rows * vocabulary if chunk_rows else CPU_CHUNK_BYTES
    allowed = 3 * rows * size * 4 + 2 * chunk
    assert allowed < rows * vocabulary * 4  # else the test would show nothing
    assert peak_bytes(arguments, chunk_rows=chunk_rows) < allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.every(2)
def test_memory_stays_bounded_where_logits_would_take_a_hundred_gigabytes(dtype: torch.dtype) -> None:
    rows, size, vocabulary, chunk_rows = 163_840, 4096, 151_936, 4096
    with FakeTensorMode():
        arguments = {
            "hidden": torch.empty(rows, size, dtype=dtype, requires_grad=True),
            "weight": torch.empty(vocabulary, size, dtype=dtype), "targets": torch.empty(rows, dtype=torch.long),
        }
        peak = peak_bytes(arguments, chunk_rows=chunk_rows)
    assert peak < 3 * rows * size * dtype.itemsize + 8 * chunk_rows * vocabulary


def test_backward_in_half_precision_makes_no_float32_copy() -> None:
    arguments, _ = problem(500, torch.bfloat16)
    logprobs = linear_logprobs(**arguments)
    with LiveStorage() as storage:
        torch.autograd.grad(logprobs.sum(), arguments["hidden"])
    assert storage.largest <= arguments["hidden"].nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained", [False, True])
def test_one_matrix_of_the_size_of_hidden_is_kept_for_backward_or_nothing(trained: bool, dtype: torch.dtype) -> None:
    arguments, _ = problem(500, dtype)
    arguments["hidden"].requires_grad_(trained)
    with LiveStorage() as storage:
        logprobs, entropy = linear_logprobs(**arguments, return_entropy=True, chunk_rows=7)
    assert logprobs.requires_grad == trained
    assert storage.live == logprobs.nbytes + entropy.nbytes + (arguments["hidden"].nbytes if trained else 0)
    assert trained or storage.largest <= 7 * V * 4


@pytest.mark.parametrize("chunk_rows", [7, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_token_has_the_largest_logit(dtype: torch.dtype, chunk_rows: int | None) -> None:
    """By all logits: its log-probability is their log-softmax's maximum, and the targets that have it are their
    argmax."""
    arguments, _ = problem(63, dtype)
    logits = (arguments["hidden"].double() @ arguments["weight"].double().T).detach()
    likeliest = logits.argmax(-1)
    targets = torch.where(torch.arange(63) % 3 == 0, likeliest, arguments["targets"])
    given = {"hidden": arguments["hidden"], "weight": arguments["weight"], "targets": targets}
    logprobs, entropy, best = linear_logprobs(**given, chunk_rows=chunk_rows, return_entropy=True, return_best=True)
    torch.testing.assert_close(best.double(), logits.log_softmax(-1).amax(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(logprobs >= best - 1e-5, likeliest == targets) and not best.requires_grad
    plain = linear_logprobs(**given, chunk_rows=chunk_rows, return_entropy=True)
    assert torch.equal(plain[0], logprobs) and torch.equal(plain[1], entropy)
    assert torch.equal(linear_logprobs(**given, chunk_rows=chunk_rows, return_best=True)[1], best)
