"""The decode kernel in the interpreter and on a card: few rows, LoRA, bias, bands, every launch listed."""

from itertools import product
from typing import Any

import pytest
import torch
from accuracy import ROUNDING, assert_as_accurate, in_float64, interpreted
from card import HALVES, gpu
from nf4_problem import ONE, THREE, problem
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowmem_grpo.kernels import few_rows
from lowmem_grpo.kernels.few_rows import decode_launch, narrow_launch, taken_rows
from lowmem_grpo.kernels.few_rows_kernels import nf4_decode_op, nf4_decode_triton, nf4_variants
from lowmem_grpo.kernels.frozen import can_decode, decode, project
from lowmem_grpo.kernels.nf4_linear import nf4_linear, nf4_linear_ref
from lowmem_grpo.kernels.triton_utils import Launch
from lowmem_grpo.kernels.triton_utils import capability as capability_of


def in_triton(arguments: dict[str, Any], launch: Launch | None = None) -> Tensor:
    """What the decode kernel computes from these arguments, in float32."""
    x, weight, a, b, scale, bias = (arguments.get(name) for name in
                                    ("x", "weight", "lora_a", "lora_b", "scale", "bias"))
    number, tensor = (0.0, scale) if torch.is_tensor(scale) else (scale or 0.0, None)
    with torch.no_grad():
        xa = None if a is None else x @ a.T
        return nf4_decode_triton(
            x, weight.tensors, weight.sizes, list(weight.out_features), xa, b, number, tensor, bias, launch
        )


def test_operator_is_sound() -> None:
    for double, scale in product((False, True), (None, torch.tensor(0.3))):
        arguments = problem(5, ONE, torch.float32, double)
        weight = arguments["weight"]
        options = (torch.randn(5, 5), torch.randn(70, 5), 0.5, scale, torch.randn(70))
        for rest in (options, (None, None, 0.0, None, None)):
            torch.library.opcheck(nf4_decode_op, (
                arguments["x"].detach(), weight.tensors, weight.sizes, [70], *rest
            ))


@interpreted
@pytest.mark.parametrize(("rows", "double"), [(1, False), (3, True), (8, False), (8, True), (13, False), (32, True),
                                              (63, False)])
@pytest.mark.every(2)
def test_decode_kernel_is_as_accurate_as_the_reference(rows: int, double: bool) -> None:
    cases = ((((33,), 64), 5), (((64, 128, 64), 512), 16), (((70,), 576), 40), (((64, 65), 256), 3))
    for size, rank in cases[::2] if rows % 3 == 0 else cases[1::2] if rows % 2 else cases:
        arguments = problem(rows, size, torch.float32, double, rank)
        truth = nf4_linear_ref(**in_float64(arguments))
        given = arguments if rank in (5, 40) else arguments | {"scale": torch.tensor(0.3)}  # a number, or a tensor
        assert_as_accurate("y", in_triton(given), nf4_linear_ref(**arguments), truth, ROUNDING[torch.float32])


@interpreted
@pytest.mark.parametrize("rows", [9, 24])
@pytest.mark.every(2)
def test_rows_in_blocks_of_8_get_the_bits_that_they_get_on_their_own(rows: int) -> None:
    launch = decode_launch(rows, 70, 75)
    assert launch.constexprs["BLOCK_M"] == 8
    for size, rank, double in ((((70,), 576), 40, False), (((64, 128, 64), 512), 3, True)):
        arguments = problem(rows, size, torch.float32, double, rank)
        plain = {name: arguments[name] for name in ("x", "weight", "bias")}  # torch rounds x A^T as its rows are many
        y = in_triton(plain, launch)
        for first in range(0, rows, 8):
            assert torch.equal(y[first : first + 8], in_triton(plain | {"x": plain["x"][first : first + 8]}, launch))
        assert_as_accurate("y", in_triton(arguments, launch), nf4_linear_ref(**arguments),
                           nf4_linear_ref(**in_float64(arguments)), ROUNDING[torch.float32])


def test_cards_without_tensor_cores_in_triton_take_some_more_rows_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, most in ((70, 32), (75, 40), (80, 64), (90, 64), (120, 64)):
        monkeypatch.setattr(few_rows, "capability", lambda device, chip=capability: chip)
        weight = problem(1, ((64,), 128), torch.float32)["weight"]
        with FakeTensorMode(), torch.device("cuda"):
            for rows in (1, most, most + 1):
                assert can_decode(torch.empty(rows, 128, dtype=torch.float16), weight) == (rows <= most)
            assert not can_decode(torch.empty(1, 128, dtype=torch.float16, device="cpu"), weight)


@gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_gpu_rows_in_blocks_of_8_get_the_bits_that_they_get_on_their_own(dtype: torch.dtype) -> None:
    arguments = problem(40, ((4096,), 4096), dtype, True, 16, device="cuda")
    launch = decode_launch(8, 4096, capability_of(arguments["x"].device))
    y = in_triton(arguments, launch)
    for first in range(0, 40, 8):
        alone = arguments | {"x": arguments["x"][first : first + 8]}
        torch.testing.assert_close(y[first : first + 8], in_triton(alone, launch))  # x A^T may round otherwise


def test_decode_operator_on_the_cpu_is_the_reference() -> None:
    arguments = problem(5, THREE, torch.float32, rank=16)
    with torch.no_grad():
        xa = arguments["x"] @ arguments["lora_a"].T
        for scale in (0.3, torch.tensor(0.3, dtype=torch.float64)):
            y = decode(arguments["x"].T.contiguous().T, arguments["weight"], xa, arguments["lora_b"], scale,
                       arguments["bias"])
            torch.testing.assert_close(y, nf4_linear_ref(**arguments))
        plain = arguments["x"], arguments["weight"]
        assert torch.equal(decode(*plain), project(*plain))


@interpreted
def test_decode_kernel_does_without_lora_and_bias() -> None:
    arguments = {name: value for name, value in problem(5, THREE, torch.float32).items() if name in ("x", "weight")}
    weight = arguments["weight"]
    for band in (weight, weight.rows(37, 200), weight.rows(200, 201)):
        arguments["weight"] = band
        truth = nf4_linear_ref(**in_float64(arguments))
        found = in_triton(arguments)
        assert_as_accurate("y", found, nf4_linear_ref(**arguments), truth, ROUNDING[torch.float32])


def test_every_launch_of_the_decode_kernel_is_listed() -> None:
    for capability in (75, 80, 86, 87, 89, 90, 100, 120):
        for dtype in (torch.float16, torch.bfloat16):
            listed = [variant.launch for variant in nf4_variants(capability, dtype)]
            for rows, outputs, columns in product(range(1, taken_rows(capability, "nf4") + 1),
                                                  (1, 100, 2048, 8192, 150_000), (64, 2048, 14336)):
                assert narrow_launch(rows, outputs, columns, capability) in listed


@gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_gpu_decodes_with_the_fused_kernel(dtype: torch.dtype) -> None:
    for rows in (1, 8):
        arguments = problem(rows, ONE, dtype, device="cuda")
        assert can_decode(arguments["x"], arguments["weight"])
        scaled = arguments | {"scale": torch.tensor(0.3, device="cuda")}
        torch.testing.assert_close(nf4_linear(**scaled), nf4_linear(**arguments))


@gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_gpu_decodes_the_same_bits_every_time_and_records_it_in_a_graph(dtype: torch.dtype) -> None:
    arguments = problem(8, ((4096,), 4096), dtype, True, 16, device="cuda")
    first = nf4_linear(**arguments)
    assert all(torch.equal(nf4_linear(**arguments), first) for _ in range(20))
    arguments = problem(4, ONE, dtype, device="cuda") | {"scale": torch.tensor(0.3, device="cuda")}
    with torch.no_grad():
        expected = nf4_linear(**arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = nf4_linear(**arguments)
        graph.replay()
    assert torch.equal(y, expected)
