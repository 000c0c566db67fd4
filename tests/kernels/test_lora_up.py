"""LoRA's second product of several layers in one launch: the kernel in the interpreter and on a card."""

from typing import Any

import pytest
import torch
from accuracy import IN_16_BITS, ROUNDING, assert_as_accurate, interpreted
from card import HALVES, gpu
from memory import CountedOps
from tables import every_row
from torch import Tensor

from lowmem_grpo.kernels import lora_up as module
from lowmem_grpo.kernels.lora_up import FEW, launch_rule, lora_up, variants
from lowmem_grpo.kernels.triton_utils import SHARED_MEMORY

# Output sizes and ranks of the layers on one input; None: without LoRA.
LAYERS = {"one": {70: 5}, "two": {64: 16, 33: 8}, "the middle one without": {65: 3, 20: None, 128: 40},
          "four": {7: 1, 8: 2, 9: None, 10: 17}}


def problem(rows: int, layers: dict[int, int | None], dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """`y` are columns of one tensor, with `low` behind them, as one product yields them."""
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randn(rows, sum(layers) + sum(rank or 0 for rank in layers.values()) + 3, generator=generator)
    *y, low = wide.to(device, dtype).split([*layers, wide.shape[1] - sum(layers)], 1)
    b = [None if rank is None else torch.randn(size, rank, generator=generator).to(device, dtype)
         for size, rank in layers.items()]
    return {"y": y, "low": low, "b": b, "scales": [0.5 + number for number in range(len(b))]}


def by_definition(
    y: list[Tensor], low: Tensor, b: list[Tensor | None], scales: list[float], dtype: torch.dtype
) -> Tensor:
    results, start = [], 0
    for part, factor, scale in zip(y, b, scales, strict=True):
        rank = 0 if factor is None else factor.shape[1]
        product = 0 if factor is None else scale * low[:, start : start + rank].to(dtype) @ factor.to(dtype).T
        results.append(part.to(dtype) + product)
        start += rank
    return torch.cat(results, 1)


def assert_right(arguments: dict[str, Any]) -> None:
    """In place, and into contiguous rows of another tensor."""
    y, dtype = arguments["y"], arguments["low"].dtype
    reference, truth = (by_definition(**arguments, dtype=kind) for kind in (dtype, torch.float64))
    out = torch.empty_like(reference)
    lora_up(out.split([part.shape[1] for part in y], 1), **arguments)
    in_place = [part.clone() for part in y]
    lora_up(in_place, **arguments | {"y": in_place})
    for found in (out, torch.cat(in_place, 1)):
        assert_as_accurate("out", found, reference, truth, ROUNDING.get(dtype, 1e-15))


@interpreted
@pytest.mark.parametrize("rows", [1, 8, 17, 65])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.every(2)
def test_each_layer_gets_its_own_product_once(rows: int, layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "lora_up_op", module.lora_up_triton)
    for dtype in (torch.float32, torch.float16):
        assert_right(problem(rows, LAYERS[layers], dtype))


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cpu", torch.float64), *IN_16_BITS[1:]])
def test_no_rows_and_every_dtype(device: str, dtype: torch.dtype) -> None:
    for rows in (0, 2):
        assert_right(problem(rows, LAYERS["the middle one without"], dtype, device))


@every_row(("layers", "launches"), [("one", 1), ("two", 1), ("the middle one without", 1), ("four", 2)])
def test_three_layers_are_one_launch(layers: str, launches: int) -> None:
    arguments = problem(2, LAYERS[layers], torch.float32)
    with CountedOps() as counted:
        lora_up([torch.empty_like(part) for part in arguments["y"]], **arguments)
    assert counted.names.count("lowmem_grpo::lora_up") == launches


@every_row("capability", [*SHARED_MEMORY, 87])
def test_every_launch_is_listed(capability: int) -> None:
    listed = [one.launch for one in variants(capability, torch.float16)]
    assert all(launch_rule(rows, capability) in listed for rows in (1, FEW, FEW + 1, 20_000))


@gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 64, 500])
def test_gpu_is_as_accurate_as_the_reference(rows: int, dtype: torch.dtype) -> None:
    for layers in (*LAYERS.values(), {2048: 16, 256: 16, 264: 16}):
        assert_right(problem(rows, layers, dtype, "cuda"))
