"""The Triton kernels under linear_logprobs in the interpreter, its ops under torch.compile, and both on a card."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accuracy import assert_as_accurate, interpreted
from card import gpu
from logprob_problem import CLOSE, SUMMATION, assert_no_worse, outcome, problem
from tables import pairwise
from torch import Tensor

from lowmem_grpo.kernels import linear_logprobs
from lowmem_grpo.kernels import logprob_kernels as kernels
from lowmem_grpo.kernels.linear_logprobs import backward_op, default_rows, forward_op
from lowmem_grpo.kernels.logprob_kernels import finish_rows_ref, logprob_rows, logprob_rows_triton

NUMBERS = [(1.0, 1.0, None, -100), (0.7, 1.0, None, -100), (1.3, 2.0, 3.0, -100)]  # of LogitShape
COLD = [(0.01, 1.0, None, -100), (0.01, 1.0, 30.0, -100), (0.01, 0.05, 1000.0, -100)]
CASES = [  # rows, vocabulary (never a multiple of a block), numbers, dtype of the gradient (float16 shares bytes with
    # the logits), gradient of the entropy: every size meets both dtypes, every dtype all numbers
    (1, 2500, NUMBERS[0], torch.float32, False), (1, 2500, NUMBERS[1], torch.float16, True),
    (13, 1003, NUMBERS[1], torch.float32, True), (13, 1003, NUMBERS[2], torch.float16, False),
    (7, 130, NUMBERS[2], torch.float32, False), (7, 130, NUMBERS[0], torch.float16, True),
    (3, 4099, NUMBERS[2], torch.float32, True), (3, 4099, NUMBERS[2], torch.float16, True),
    *((7, 2500, numbers, torch.float32, True) for numbers in COLD),
]


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random raw logits (R, V), targets with some ignored, a bias with one entry at -inf."""
    generator = torch.Generator().manual_seed(rows)
    targets = torch.randint(1, vocabulary, (rows,), generator=generator)
    targets[1::4] = -100
    bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    bias[0] = -torch.inf
    logits = 4 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    return {"logits": logits.to(dtype), "targets": targets, "bias": bias.to(dtype)}


def compare(launch: Callable[..., Any], reference: Callable[..., Any], arguments: dict[str, Any],
            last: tuple[Any, ...], packing: torch.dtype) -> None:
    """Runs kernel, float32 reference and float64 truth on copies, and holds all that they return or overwrite."""
    doubled = {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    outcomes = []
    for function, given, dtype in (
        (launch, arguments, packing), (reference, arguments, torch.float32), (reference, doubled, torch.float64)
    ):
        given = {name: value.clone() if torch.is_tensor(value) else value for name, value in given.items()}
        result = function(*given.values(), *last, dtype)
        columns = given["logits"].shape[1]
        gradient = given["logits"] if dtype != torch.float16 else given["logits"].view(dtype)[:, :columns]
        outcomes.append([gradient, *([result] if result is not None else [])])
    slack = SUMMATION if packing == torch.float32 else SUMMATION + 2**-11
    for index, (ours, reference_value, truth) in enumerate(zip(*outcomes, strict=True)):
        assert ours.double().isfinite().all()
        assert_as_accurate(f"result {index}", ours, reference_value, truth, slack)


def backward(forward: Callable[..., Tensor], tile: Callable[..., None]) -> Callable[..., None]:
    """A backward tile with what its own forward pass found, whose targets are the entries from `first` on."""
    def run(logits: Tensor, targets: Tensor, bias: Tensor, *rest: Any) -> None:
        *grads, temperature, scale, softcap, ignored, first, dtype = rest
        numbers = temperature, scale, softcap, ignored
        _, entropy, maximum, log_sum = forward(logits.clone(), targets, bias, *numbers, None)
        later = torch.where(targets < 0, targets, targets + first)
        tile(logits, later, bias, maximum, log_sum, entropy, *grads, *numbers, first, dtype)

    return run


@interpreted
@pytest.mark.parametrize(("rows", "vocabulary", "numbers", "packing", "entropy_gradient"), CASES)
@pytest.mark.parametrize("kernel", ["rows", "backward tile"])
@pytest.mark.every(2)
def test_a_kernel_is_as_accurate_as_its_reference(
    kernel: str, rows: int, vocabulary: int, numbers: tuple[Any, ...], packing: torch.dtype, entropy_gradient: bool
) -> None:
    given = logits_of(rows, vocabulary)
    if kernel == "rows":
        return compare(logprob_rows_triton, finish_rows_ref, given, numbers, packing)
    arguments = given | {
        "grad_logprobs": torch.rand(rows) * 2 - 1,
        "grad_entropy": torch.rand(rows) * 2 - 1 if entropy_gradient else None,
    }
    launch = backward(logprob_rows_triton, kernels.logprob_tile_bwd_triton)
    return compare(launch, backward(finish_rows_ref, kernels.differentiate_ref), arguments, (*numbers, 7), packing)


@interpreted
def test_row_kernel_gives_minus_infinity_for_a_target_without_weight_and_nan_for_nan() -> None:
    given = logits_of(6, 1003)
    given["targets"][:] = torch.tensor([0, 5, 5, 1003, -1, -100])
    given["logits"][2, 700] = torch.nan
    logprobs, *_ = logprob_rows_triton(*given.values(), *NUMBERS[0], None)
    assert logprobs[0] == -torch.inf and logprobs[1].isfinite() and logprobs[2].isnan()
    assert logprobs[3:5].isnan().all() and logprobs[5] == 0  # tokens that the head does not have, and an ignored one


@interpreted
def test_a_target_outside_of_the_vocabulary_is_nan_and_reads_no_other_row() -> None:
    given = logits_of(4, 1003)
    given["targets"] = torch.tensor([-1, 5, 1003, -100])  # row 0 would read before the logits, row 2 in row 3
    results = logprob_rows_triton(*given.values(), *NUMBERS[0], torch.float32)
    assert results[:2].isnan().any(1).all() and results[:2].isnan().sum() == 4 and results[0, 3] == 0
    assert results[:2].isnan().all(0).tolist() == given["logits"].isnan().all(1).tolist() == [True, False, True, False]


@interpreted
def test_a_vocabulary_that_begins_with_entries_at_minus_infinity_has_an_entropy() -> None:
    given = logits_of(3, 8 * 2048)
    given["bias"][: 5 * 2048 + 7], given["targets"] = -torch.inf, given["targets"] // 4 + 6 * 2048
    truth = finish_rows_ref(*(value.double() if value.is_floating_point() else value for value in given.values()),
                            *NUMBERS[0], None)
    entropy = logprob_rows_triton(*given.values(), *NUMBERS[0], None)[1]
    torch.testing.assert_close(entropy.double(), truth[1], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ops_keep_torchs_contract(dtype: torch.dtype) -> None:
    given = logits_of(7, 130)
    rows = {name: torch.rand(7) for name in ("maximum", "log_sum", "entropy", "grad_logprobs", "grad_entropy")}
    torch.library.opcheck(logprob_rows, (*given.values(), *NUMBERS[2], dtype))
    torch.library.opcheck(kernels.logprob_tile_bwd, (*given.values(), *rows.values(), *NUMBERS[2], 0, dtype))


@pytest.mark.parametrize("keep_gradient", [False, True])
def test_whole_ops_keep_torchs_contract(keep_gradient: bool) -> None:
    arguments, _ = problem(7, torch.float32, bias=True, trained=[])
    given = *(arguments[name] for name in ("hidden", "weight", "bias", "targets")), *NUMBERS[2]
    torch.library.opcheck(forward_op, (*given, 3, keep_gradient))
    rows = torch.rand(4, 7), torch.rand(7), torch.rand(7)
    for needed in ([True] * 3, [False, True, False]):
        torch.library.opcheck(backward_op, (*given, 100, *rows, needed))


COMPILED = [{}, {"bias": True, "softcap": 3.0, "temperature": 0.7}, {"trained": ["hidden", "weight"]},
            {"trained": ["hidden", "bias"], "bias": True}]


@pytest.mark.parametrize("options", COMPILED)
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.every(2)
def test_compiled_calls_give_what_eager_ones_give(options: dict[str, Any], entropy_grad: bool) -> None:
    arguments, grad = problem(63, torch.float32, **options)
    grads = (grad, 0.5 * grad) if entropy_grad else (grad,)
    settings = {"return_entropy": True, "chunk_rows": 7, "entropy_grad": entropy_grad}
    compiled = torch.compile(linear_logprobs, backend="aot_eager", fullgraph=True)
    expected = outcome(linear_logprobs, arguments, *grads, **settings)
    for name, values in outcome(compiled, arguments, *grads, **settings).items():
        torch.testing.assert_close(values, expected[name], **CLOSE, msg=name)


def test_default_chunk_of_logits_keeps_within_its_budget() -> None:
    for vocabulary in (1, 384, 128256, 151936, 10**8):
        rows = default_rows(torch.device("cpu"), vocabulary)
        assert rows >= 1 and (4 * rows * vocabulary <= 32 * 2**20 or rows == 1)


@gpu
@pytest.mark.parametrize(*pairwise(
    dtype=[torch.float32, torch.bfloat16, torch.float16], entropy_grad=[False, True], rows=[1, 63, 500],
    options=[*COMPILED, {"temperature": 1.3, "logit_scale": 2.0, "softcap": 3.0}],
))
def test_on_a_card_errors_are_no_larger_than_the_references(
    dtype: torch.dtype, options: dict[str, Any], entropy_grad: bool, rows: int
) -> None:
    arguments, grad = problem(rows, dtype, **options)
    grads = (grad, 0.5 * grad) if entropy_grad else (grad,)
    on_card = {
        name: value.detach().cuda().requires_grad_(value.requires_grad) if torch.is_tensor(value) else value
        for name, value in arguments.items()
    }
    ours = outcome(linear_logprobs, on_card, *grads, return_entropy=True, chunk_rows=100, entropy_grad=entropy_grad)
    assert_no_worse(arguments, {name: value.cpu() for name, value in ours.items()}, *grads, dtype=dtype)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_card_two_runs_are_equal_bit_for_bit(dtype: torch.dtype) -> None:
    """A race between reading logits and writing the gradient over them would show here."""
    hidden = torch.randn(512, 256, device="cuda", dtype=dtype, requires_grad=True)
    weight, targets = torch.randn(50021, 256, device="cuda", dtype=dtype), torch.randint(50021, (512,), device="cuda")
    runs = []
    for _ in range(3):
        logprobs = linear_logprobs(hidden, weight, targets)
        runs.append((logprobs, *torch.autograd.grad(logprobs.sum(), hidden)))
    for run in runs[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(run, runs[0], strict=True))
