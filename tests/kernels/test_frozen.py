"""Products with weights in FP8 and NF4: outputs and every gradient against float64, bands, memory."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from accuracy import ROUNDING, assert_each_as_accurate, in_float64, outcome
from card import DEVICES
from fp8_weights import KINDS, by_definition, in_fp8, joined
from memory import CountedOps, LiveStorage
from nf4_problem import quantized
from tables import every_row, pairwise
from torch import Tensor

from lowmem_grpo.kernels import frozen_weight
from lowmem_grpo.kernels.fp8 import FP8Weight, fp8_dequantize
from lowmem_grpo.kernels.frozen import frozen_linear
from lowmem_grpo.kernels.lora import LoRA, lora_linear, lora_linear_ref
from lowmem_grpo.kernels.lora_mlp import lora_mlp, lora_mlp_ref
from lowmem_grpo.kernels.nf4 import NF4Weight, nf4_dequantize, nf4_dequantize_ref

NF4 = ("nf4", "nested")
ODD = [(1, 63, 130), (63, 257, 129), (500, 70, 385)]  # rows of x, out, in: no multiples of a block


def random(*shape: int, dtype: torch.dtype, device: Any = "cpu", seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + shape[0]))
    return values.to(device, dtype).requires_grad_()


def pair(size_out: int, size_in: int, dtype: torch.dtype, device: Any, seed: int) -> LoRA:
    """A LoRA pair of rank 5 of which both halves matter."""
    a, b = (random(*shape, dtype=torch.float32, seed=seed) for shape in ((5, size_in), (size_out, 5)))
    return LoRA(*((part.detach() / 4).to(device, dtype).requires_grad_() for part in (a, b)), 0.7)


def weight_of(shape: tuple[int, int], kind: str, dtype: torch.dtype, device: Any = "cpu") -> Any:
    return NF4Weight.from_bitsandbytes(quantized(*shape, dtype, kind == "nested", device)) if kind in NF4 else in_fp8(
        shape, kind, dtype, device)


def exact(value: Any) -> Any:
    """The same in float64, with weights dequantized."""
    if isinstance(value, list):
        return [exact(one) for one in value]
    if isinstance(value, NF4Weight):
        return nf4_dequantize_ref(replace(value, dtype=torch.float64))
    return by_definition(value) if isinstance(value, FP8Weight) else in_float64(value)


def dequantized(value: Any) -> Any:
    """The same with weights dequantized in their dtype."""
    if isinstance(value, list):
        return [dequantized(one) for one in value]
    if isinstance(value, NF4Weight):
        return nf4_dequantize(value)
    return fp8_dequantize(value) if isinstance(value, FP8Weight) else value


def assert_no_worse(ours: Any, reference: Any, arguments: dict[str, Any], dtype: torch.dtype) -> None:
    """Our errors are at most those of the same product with dequantized weights in the same dtype."""
    found = outcome(ours, arguments)
    plain = outcome(reference, {name: dequantized(value) for name, value in arguments.items()})
    truth = outcome(reference, {name: exact(value) for name, value in arguments.items()})
    assert_each_as_accurate(found, plain, truth, ROUNDING[dtype])


def linears_ref(x: Tensor, weights: list[Tensor], loras: list[LoRA], features: tuple[int, ...] = ()) -> Tensor:
    whole = torch.cat(weights).split(features) if features else weights
    return torch.cat([lora_linear_ref(x, one, lora) for one, lora in zip(whole, loras, strict=True)], -1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.every(2)
def test_linear_errors_are_those_of_the_dequantized_weight(dtype: torch.dtype, device: torch.device) -> None:
    for kind, (rows, out, inputs) in product((*KINDS, *NF4), ODD):
        weight = weight_of((out, inputs), kind, dtype, device)
        x = random(rows, inputs, dtype=dtype, device=device)
        lora = pair(out, inputs, dtype, device, 1)
        assert_no_worse(lora_linear, linears_ref, {"x": x, "weights": [weight], "loras": [lora]}, dtype)
        arguments = {"x": x, "weight": weight, "bias": random(out, dtype=dtype, device=device)}
        assert_no_worse(frozen_linear, torch.nn.functional.linear, arguments, dtype)


@pytest.mark.parametrize(*pairwise(
    dtype=ROUNDING, band_bytes=[None, 20_000],
    **{"features,kind": [((128, 256, 33), "128"), ((70, 30, 33), "row"), ((128, 64, 33), "nested")]},
))
def test_adjacent_matrices_are_computed_apart(
    features: tuple[int, ...], kind: str, dtype: torch.dtype, band_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if band_bytes:
        monkeypatch.setattr(frozen_weight, "BAND_BYTES", band_bytes)
    width = 256 if kind in NF4 else 130
    weight = (NF4Weight.adjacent([quantized(rows, width, dtype, True) for rows in features]) if kind in NF4
              else joined(features, width, dtype, kind))
    loras = [pair(out, width, dtype, "cpu", out) for out in features]
    assert_no_worse(lora_linear, lambda **given: linears_ref(**given, features=features),
                    {"x": random(63, width, dtype=dtype), "weights": [weight], "loras": loras}, dtype)


@every_row("dtype", ROUNDING)
@every_row("kind", ["row", "128", *NF4])
def test_mlp_errors_are_those_of_the_dequantized_weights(kind: str, dtype: torch.dtype) -> None:
    inputs, inner = 63, 130
    weights = {name: weight_of(shape, kind, dtype) for name, shape in
               {"gate": (inner, inputs), "up": (inner, inputs), "down": (inputs, inner)}.items()}
    loras = {f"{name}_lora": pair(*weight.shape, dtype, "cpu", len(name)) for name, weight in weights.items()}
    assert_no_worse(lora_mlp, lora_mlp_ref, {"x": random(50, inputs, dtype=dtype)} | weights | loras, dtype)


@pytest.mark.parametrize("kind", [*KINDS, *NF4])
def test_bands_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of((300, 260), kind, torch.float32)
    x, grad = random(9, 260, dtype=torch.float32).detach(), random(9, 300, dtype=torch.float32).detach()
    whole = weight.project(x), weight.project_back([grad])
    torch.testing.assert_close(whole, (x @ dequantized(weight).T, grad @ dequantized(weight)))
    assert not weight.project(x.clone().requires_grad_()).requires_grad
    monkeypatch.setattr(frozen_weight, "BAND_BYTES", 10_000)
    torch.testing.assert_close((weight.project(x), weight.project_back([grad])), whole)


def test_no_dequantized_weight_is_kept_and_only_a_band_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 x 1,024 weights in bfloat16 are 4 MiB; a band has 256 KiB."""
    band = 2**18
    monkeypatch.setattr(frozen_weight, "BAND_BYTES", band)
    monkeypatch.setattr("lowmem_grpo.kernels.fp8.REFERENCE_ELEMENTS", 2**14)  # temporaries of the CPU path
    monkeypatch.setattr("lowmem_grpo.kernels.custom_op.UPCAST_BYTES", 2**17)  # of a CPU without 16-bit products
    weight = in_fp8((2048, 1024), "row", torch.bfloat16)
    x = random(3, 1024, dtype=torch.bfloat16)
    with LiveStorage() as storage:
        y = frozen_linear(x, weight)
    assert storage.live == y.nbytes
    assert storage.peak < band + 2**18 + 2 * y.nbytes
    with LiveStorage() as storage:
        torch.autograd.grad(y, x, torch.ones_like(y))
    assert storage.peak < band + 2**18 + 4 * x.nbytes + y.nbytes


def test_autocast_and_deep_inputs_change_nothing() -> None:
    weight, x = in_fp8((33, 64)), random(2, 3, 64, dtype=torch.float32)
    y = frozen_linear(x, weight)
    assert y.shape == (2, 3, 33)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(frozen_linear(x, weight), y)


def test_a_weight_of_bitsandbytes_is_taken_as_it_is() -> None:
    param, x = quantized(33, 64, torch.float32), random(2, 3, 64, dtype=torch.float32)
    weight = NF4Weight.from_bitsandbytes(param)
    assert torch.equal(frozen_linear(x, param), frozen_linear(x, weight))
    assert torch.equal(nf4_dequantize(param), nf4_dequantize(weight))


@every_row("kind", [*KINDS, *NF4])
def test_weights_that_sampling_holds_in_16_bits_serve_all_passes_with_the_same_bits_until_they_are_dropped(
    kind: str,
) -> None:
    weight, x = weight_of((70, 128), kind, torch.bfloat16), random(9, 128, dtype=torch.bfloat16)

    def passed() -> tuple[list[Tensor], list[str]]:
        with CountedOps() as ops:
            y = frozen_linear(x, weight)
            return [y, *torch.autograd.grad(y, x, y.detach())], [name for name in ops.names if "dequantize" in name]

    before, decoded = passed()
    wide = frozen_weight.WideWeights(0)
    wide.dequantized(weight, x)
    held, again = passed()
    assert decoded and not again and all(map(torch.equal, held, before))
    with torch.no_grad():
        frozen_linear(x.float(), weight)  # of another dtype
    wide.held.clear()
    assert passed()[1] == decoded and not frozen_weight.LENT
