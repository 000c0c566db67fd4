"""rms_norm against float64 truth, against the modules of transformers that it replaces, and the memory it takes."""

import importlib
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from accuracy import IN_16_BITS, assert_as_accurate, in_float64, in_triton, interpreted
from card import CARD, DEVICES
from memory import LiveStorage
from tables import every_row
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from lowmem_grpo.kernels.rms_norm import rms_norm, rms_norm_ref

module = importlib.import_module("lowmem_grpo.kernels.rms_norm")  # the package gives its function this name
EPS = 1e-6
SUMMATION = 2e-6  # slack for adding up a row, or the rows of grad_weight, in another order; of the largest value
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of a gradient, once, when stored
DTYPES = list(ROUNDING)
FORMS = [(residual, offset) for residual in (False, True) for offset in (0.0, 1.0)]
SHAPES = [(1, 7), (63, 65), (500, 33), (2, 3, 5, 128)]
FAMILIES = [LlamaRMSNorm, Gemma3RMSNorm, Olmo2RMSNorm]  # most others copy Llama's
OPTIONS: dict[Any, dict[str, Any]] = {Gemma3RMSNorm: {"offset": 1.0}, Olmo2RMSNorm: {"round_once": True}}


def problem(
    shape: tuple[int, ...], dtype: torch.dtype, residual: bool, device: Any = "cpu"
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """x, weight and residual that require gradients, and random gradients of y and of the sum."""
    generator = torch.Generator().manual_seed(shape[-1])

    def values(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    tensors = {"x": values(*shape), "weight": values(shape[-1])} | ({"residual": values(*shape)} if residual else {})
    grads = [values(*shape) for _ in range(1 + residual)]
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}, grads


def outcome(function: Any, tensors: dict[str, Tensor], grads: list[Tensor], offset: float) -> dict[str, Tensor]:
    """y, the sum, and every gradient."""
    results = function(**tensors, eps=EPS, offset=offset)
    results = results if isinstance(results, tuple) else (results,)
    grads = [grad.to(result) for grad, result in zip(grads, results, strict=True)]
    leaves = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    found = torch.autograd.grad(results, list(leaves.values()), grads)
    return dict(zip(("y", "sum"), results, strict=False)) | dict(zip(leaves, found, strict=True))


def assert_accurate(tensors: dict[str, Tensor], grads: list[Tensor], offset: float, ours: dict[str, Tensor]) -> None:
    truth = outcome(rms_norm_ref, in_float64(tensors), grads, offset)
    reference = outcome(rms_norm_ref, tensors, grads, offset)
    assert ours.keys() == truth.keys()
    for name, exact in truth.items():
        assert ours[name].dtype == reference[name].dtype
        slack = SUMMATION + (ROUNDING[ours[name].dtype] if name in tensors else 0)
        assert_as_accurate(name, ours[name], reference[name], exact.detach(), slack)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_no_larger_than_the_references(dtype: torch.dtype, device: torch.device) -> None:
    larger = [(63, 8192), (17, 12289), (9, 65536), (5000, 8, 128), (4099, 2560)] if device == CARD else []
    for shape, (residual, offset) in product(SHAPES + larger, FORMS):
        tensors, grads = problem(shape, dtype, residual, device)
        assert_accurate(tensors, grads, offset, outcome(rms_norm, tensors, grads, offset))


@interpreted
@pytest.mark.parametrize(("rows", "columns", "residual", "offset"), [
    *((63, 65, *form) for form in FORMS), *((3, 8200, *form) for form in FORMS),
    (1, 7, False, 0.0), (500, 33, True, 1.0), (9, 2050, True, 0.0),
])
@pytest.mark.every(2)
def test_the_kernels_errors_are_no_larger_than_the_references(
    rows: int, columns: int, residual: bool, offset: float
) -> None:
    tensors, grads = problem((rows, columns), torch.float32, residual)
    with in_triton():
        for given in (tensors, tensors | {"weight": tensors["weight"].detach()}):
            assert_accurate(given, grads, offset, outcome(rms_norm, given, grads, offset))


@interpreted
@pytest.mark.parametrize("columns", [65, 8200])
@pytest.mark.every(2)
def test_partial_sums_of_several_programs_and_steps_add_up(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARTIAL_SUMS", 3)
    tensors, grads = problem((19 if columns > 100 else 200, columns), torch.float32, True)
    with in_triton():
        assert_accurate(tensors, grads, 0.0, outcome(rms_norm, tensors, grads, 0.0))


@interpreted
@pytest.mark.parametrize("residual", [False, True])
def test_the_kernels_read_rows_by_their_strides(residual: bool) -> None:
    tensors, grads = problem((63, 65), torch.float32, residual)
    with in_triton():
        expected = outcome(rms_norm, tensors, grads, 0.0)
        for change in (lambda x: torch.cat((x, x), -1)[..., 65:], lambda x: torch.stack((x, x), -1)[..., 0]):
            strided = {name: change(values.detach()).requires_grad_() for name, values in tensors.items()}
            assert strided["x"].stride(0) == 130
            for name, values in outcome(rms_norm, strided, [change(grad) for grad in grads], 0.0).items():
                assert torch.equal(values, expected[name]), name


def families_norm(family: Any, columns: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Any, dict[str, Any]]:
    """A module with random weights, and the options that make rms_norm its equal."""
    norm = family(columns, eps=EPS).to(device, dtype)
    torch.nn.init.normal_(norm.weight)
    return norm, OPTIONS.get(family, {})


@every_row("family", FAMILIES)
def test_results_are_those_of_transformers(family: Any) -> None:
    for dtype, shape in product(DTYPES, ((2, 7, 96), (2, 7, 4, 16))):  # hidden states; heads of queries or keys
        torch.manual_seed(0)
        norm, options = families_norm(family, shape[-1], dtype)
        x = torch.randn(shape, dtype=dtype)
        assert torch.equal(rms_norm(x, norm.weight, EPS, **options), norm(x)), (dtype, shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_float32_weight_gives_the_dtype_that_transformers_gives(family: Any) -> None:
    norm, options = families_norm(family, 33, torch.float32)
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).requires_grad_()
    ours, theirs = rms_norm(x, norm.weight, EPS, **options), norm(x)
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    exact = in_float64({"x": x, "weight": norm.weight})
    truth = torch.autograd.grad(rms_norm_ref(**exact, eps=EPS, **options).sum(), list(exact.values()))
    gradients = [torch.autograd.grad(y.sum(), (x, norm.weight)) for y in (ours, theirs)]
    for name, mine, other, right in zip(exact, *gradients, truth, strict=True):
        assert_as_accurate(name, mine, other, right, ROUNDING[torch.bfloat16])


@pytest.mark.parametrize(("device", "dtype"), IN_16_BITS)
def test_the_kernel_rounds_in_the_order_of_transformers(device: str, dtype: torch.dtype) -> None:
    for family in FAMILIES:
        torch.manual_seed(0)
        norm, options = families_norm(family, 128, dtype, device)
        x = torch.randn(200, 128, device=device).to(dtype)
        order = {"offset": 0.0} | options
        same = module.rms_norm_fwd_triton(x, norm.weight.detach(), None, EPS, **order)[0] == norm(x)
        # of the rest rstd differs in its last bit; the other order agrees on 70 to 80 %
        assert same.double().mean() > (0.995 if device == "cpu" else 0.99), family


@pytest.mark.parametrize(("dtype", "in_kernel"), [
    *((dtype, False) for dtype in DTYPES),
    *(pytest.param(dtype, True, marks=interpreted) for dtype in (torch.float32, torch.float16))])
def test_an_input_that_is_passed_on_has_the_gradient_of_both_uses(dtype: torch.dtype, in_kernel: bool) -> None:
    """In 16 bits the sum is rounded once, where autograd's own would be rounded twice."""
    tensors, (grad,) = problem((65, 33), dtype, False)
    other = torch.randn(65, 33, generator=torch.Generator().manual_seed(1)).to(dtype)

    def reference(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        y = rms_norm_ref(x, weight, eps, offset=offset)
        assert isinstance(y, Tensor)
        return y, x * 1

    def ours(**options: Any) -> Any:
        return rms_norm(**options, with_sum=True)

    truth = outcome(reference, in_float64(tensors), [grad, other], 0.0)
    usual = outcome(reference, tensors, [grad, other], 0.0)
    with in_triton() if in_kernel else nullcontext():
        found = outcome(ours, tensors, [grad, other], 0.0)
    assert torch.equal(found["sum"], tensors["x"])
    for name in ("y", "x", "weight"):
        assert_as_accurate(name, found[name], usual[name], truth[name].detach(), SUMMATION)
    with torch.no_grad():
        y, same = ours(**tensors, eps=EPS)
    torch.testing.assert_close(y, found["y"].detach())
    assert same is tensors["x"]


@pytest.mark.parametrize("used", [0, 1])
def test_either_result_may_go_unused(used: int) -> None:
    tensors, grads = problem((5, 33), torch.float32, True)
    ours, expected = (
        torch.autograd.grad(function(**tensors)[used], list(tensors.values()), grads[used], allow_unused=True)
        for function in (rms_norm, rms_norm_ref)
    )
    for mine, reference in zip(ours, expected, strict=True):
        assert (mine is None) == (reference is None)
        if mine is not None:
            torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize("shape", [(0, 33), (2, 0, 33)])
def test_no_rows_give_no_results(shape: tuple[int, ...]) -> None:
    ours = outcome(rms_norm, *problem(shape, torch.float32, True), 0.0)
    assert ours["y"].shape == ours["sum"].shape == ours["x"].shape == shape and not ours["weight"].any()


@pytest.mark.parametrize("residual", [False, True])
def test_nothing_but_the_results_and_a_number_a_row_is_kept(residual: bool) -> None:
    for frozen in (False, True):
        tensors, grads = problem((500, 33), torch.bfloat16, residual)
        tensors["weight"].requires_grad_(not frozen)
        with LiveStorage() as storage:
            results = rms_norm(**tensors)
            results = results if residual else (results,)
            kept = sum(result.nbytes for result in results) + 500 * 4
            assert storage.live == kept
            torch.autograd.grad(results, tensors["x"], grads)
        assert storage.peak == kept + tensors["x"].nbytes + (0 if frozen else tensors["weight"].nbytes)
