"""nf4_linear: accuracy of the output and every gradient, agreement with bitsandbytes and PEFT, memory."""

from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from accuracy import ROUNDING, assert_as_accurate, in_float64, outcome
from card import gpu
from memory import LiveStorage
from nf4_problem import (
    DTYPES,
    GRADIENTS,
    ODD,
    ONE,
    THREE,
    assert_all_as_accurate,
    problem,
    quantized,
)
from peft import LoraConfig, get_peft_model
from tables import pairwise
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowmem_grpo.kernels import frozen_weight
from lowmem_grpo.kernels.nf4 import NF4Weight
from lowmem_grpo.kernels.nf4_linear import nf4_linear, nf4_linear_ref


def small_bands(monkeypatch: pytest.MonkeyPatch, size: int = 10_000) -> None:
    """Makes even a small weight need many bands."""
    monkeypatch.setattr(frozen_weight, "BAND_BYTES", size)


@pytest.mark.parametrize(*pairwise(dtype=DTYPES, size=[ONE, THREE, ODD], rows=[1, 63, 500]))
def test_error_is_that_of_the_reference(rows: int, size: Any, dtype: torch.dtype) -> None:
    assert_all_as_accurate(problem(rows, size, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [ONE, THREE, ODD])
def test_many_bands_are_as_accurate_as_one(size: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    small_bands(monkeypatch)
    assert_all_as_accurate(problem(20, size, dtype, double=size != THREE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("double", [False, True])
def test_agrees_with_bitsandbytes_and_peft(double: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = bnb.nn.Linear4bit(256, 70, quant_type="nf4", compress_statistics=double, compute_dtype=dtype).to(dtype)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["0"], init_lora_weights=False)
    layer = get_peft_model(torch.nn.Sequential(linear.to("cpu")), config).train().base_model.model[0]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.dtype == torch.float32
    x = torch.randn(2, 9, 256, dtype=dtype, requires_grad=True)
    grad = torch.randn(2, 9, 70, dtype=dtype)
    theirs = torch.autograd.grad(layer(x), (x, a, b), grad, retain_graph=True)
    y = nf4_linear(x, layer.base_layer.weight, a, b, 1.5, layer.base_layer.bias)
    ours = torch.autograd.grad(y, (x, a, b), grad)
    for found, expected in zip((y, *ours), (layer(x), *theirs), strict=True):
        assert found.dtype == expected.dtype
        assert (found - expected).abs().max() <= 4 * ROUNDING[dtype] * expected.abs().max()


def test_master_adapters_get_gradients_in_their_own_dtype() -> None:
    arguments = problem(9, THREE, torch.bfloat16, lora_dtype=torch.float32)
    assert_all_as_accurate(arguments)
    assert outcome(nf4_linear, arguments)["lora_a"].dtype == torch.float32


def test_scale_may_be_a_tensor_that_is_switched_later() -> None:
    arguments = problem(9, ONE, torch.float32)
    scale = torch.tensor(0.3)
    switched = nf4_linear(**(arguments | {"scale": scale}))
    assert torch.equal(switched, nf4_linear(**arguments))
    off = nf4_linear(**(arguments | {"scale": scale.zero_()}))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        switched.sum().backward()  # its gradients would be those of another scale
    torch.testing.assert_close(off, nf4_linear(**(arguments | {"lora_a": None, "lora_b": None})))


def kept_bytes(arguments: dict[str, Any]) -> int:
    """Bytes that the backward pass holds on to: those made in the forward pass, and those of the arguments."""
    given = {value.data_ptr() for value in arguments.values() if torch.is_tensor(value)}
    with LiveStorage() as storage:
        y = nf4_linear(**arguments)
        saved = [part for part in backward_node(y).saved_tensors if part is not None]
        return storage.live - y.nbytes + sum(part.nbytes for part in saved if part.data_ptr() in given)


def backward_node(y: Tensor) -> Any:
    """The autograd node of NF4LinearFunction behind the final view."""
    node = y.grad_fn
    while type(node).__name__ != "NF4LinearFunctionBackward":
        node = node.next_functions[0][0]
    return node


def test_only_what_the_gradients_need_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    small_bands(monkeypatch)
    arguments = problem(500, ONE, torch.float32)
    x, a, b, bias = (arguments[name] for name in GRADIENTS)
    frozen = {name: arguments[name].detach() for name in GRADIENTS}
    bare = {"x": x, "weight": arguments["weight"]}
    assert kept_bytes(bare) == 0, "only dx is asked for: neither x nor a dequantized weight"
    assert kept_bytes(arguments | frozen | {"x": x}) == a.nbytes + b.nbytes
    assert kept_bytes(arguments | frozen | {"lora_b": b}) == 500 * 5 * 4, "x A^T is enough for dB"
    assert kept_bytes(arguments | frozen | {"lora_a": a}) == x.nbytes + b.nbytes
    assert kept_bytes(arguments | frozen | {"bias": bias}) == 0
    assert kept_bytes(arguments) == x.nbytes + a.nbytes + b.nbytes + 500 * 5 * 4


def test_peak_is_one_band_above_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    size, rows, band = ((512, 256), 1024), 64, 100_000
    small_bands(monkeypatch, band)
    arguments = problem(rows, size, torch.float32)
    adapters = 4 * (2 * arguments["lora_a"].numel() + 2 * arguments["lora_b"].numel() + 6 * rows * 10)
    with LiveStorage() as storage:
        y = nf4_linear(**arguments)
        assert storage.peak <= y.nbytes + band + 64 * 1024 * 4 + adapters
        assert storage.largest <= max(y.nbytes, band + 64 * 1024 * 4)
    with LiveStorage() as storage:
        y.sum().backward()
        assert storage.peak <= y.nbytes + arguments["x"].nbytes + band + 64 * 768 * 4 + adapters + 4 * 768


def test_an_8b_layer_fits_in_fake_tensors() -> None:
    rows, columns, tokens = 14_336, 4_096, 20_480
    with FakeTensorMode(), LiveStorage() as storage:
        weight = NF4Weight(
            torch.empty(rows * columns // 2, dtype=torch.uint8), torch.empty(rows * columns // 64), torch.empty(16),
            (rows, columns), 64, torch.bfloat16, (rows,),
        )
        before = storage.live
        x = torch.empty(tokens, columns, dtype=torch.bfloat16, requires_grad=True)
        y = nf4_linear(x, weight)
        assert storage.peak - before == x.nbytes + y.nbytes + 58_720_256  # 2 bands of 56 MiB: half of the weight
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


@pytest.mark.slow
def test_it_compiles_into_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    small_bands(monkeypatch, 50_000)
    arguments = problem(7, THREE, torch.float32)
    compiled = torch.compile(lambda **options: nf4_linear(**options), backend="aot_eager", fullgraph=True)
    expected = outcome(nf4_linear, arguments)
    for name, found in outcome(compiled, arguments).items():
        torch.testing.assert_close(found, expected[name])
    param, x = quantized(70, 192, torch.float32, double=True), torch.randn(3, 192)
    assert torch.equal(compiled(x=x, weight=param), nf4_linear(x, param))


def test_strided_empty_and_deep_inputs_and_autocast() -> None:
    arguments = problem(12, ONE, torch.float32)
    y = nf4_linear(**arguments)
    x, b = arguments["x"].detach(), arguments["lora_b"]
    strided = torch.empty(192, 12).T.copy_(x)
    turned = nf4_linear(**(arguments | {"x": strided, "lora_b": b.detach().T.contiguous().T}))
    truth = nf4_linear_ref(**in_float64(arguments))
    assert_as_accurate("strided", turned, y, truth, ROUNDING[torch.float32])  # another order of summation
    deep = nf4_linear(**(arguments | {"x": x.view(2, 3, 2, 192)}))
    assert torch.equal(deep.view(12, 70), y)
    assert nf4_linear(**(arguments | {"x": x[0]})).shape == (70,)
    empty = outcome(nf4_linear, arguments | {"x": torch.empty(0, 192, requires_grad=True)})
    assert empty["y"].shape == (0, 70)
    assert empty["lora_a"].abs().max() == 0
    with torch.autocast("cpu", torch.bfloat16):
        under = outcome(nf4_linear, arguments)
    assert all(torch.equal(part, under[name]) for name, part in outcome(nf4_linear, arguments).items())


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_is_as_accurate_as_the_reference(dtype: torch.dtype) -> None:
    for size in (ONE, THREE, ODD, ((9000,), 512), ((64, 128, 64), 768)):
        for rows in (1, 2, 3, 8, 13, 17, 33, 64, 65, 500):
            assert_all_as_accurate(problem(rows, size, dtype, size != THREE, 16, device="cuda"))
