"""Grouped products with 4-bit experts in the interpreter: by the definition of the codes, for any spread of rows."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accuracy import IN_16_BITS, assert_as_accurate, assert_each_as_accurate, in_float64, interpreted, outcome
from mixtures import problem, random, stack
from tables import every_row, pairwise
from torch import Tensor

from lowmem_grpo.kernels.expert_matrices import Matrices
from lowmem_grpo.kernels.frozen import FrozenStack
from lowmem_grpo.kernels.grouped_products import Places, block_rows
from lowmem_grpo.kernels.mxfp4 import mxfp4_dequantize_ref
from lowmem_grpo.kernels.nf4 import NF4Weight, nf4_dequantize_ref
from lowmem_grpo.kernels.routed_experts import grouped_backward, grouped_forward, routed_experts_ref

SPREADS = {  # ids of places
    "even": torch.arange(66) % 6, "one expert": torch.full((70,), 3), "few": torch.tensor([5, 0]),
    "the last ones idle": torch.arange(40) % 2, "many": torch.arange(400) % 3,
}


def by_definition(x: Tensor, experts: FrozenStack, ids: Tensor, back: bool, scale: Tensor) -> Tensor:
    """Each place by itself."""
    held: Any = replace(experts.weight, dtype=x.dtype)  # type: ignore[type-var]
    reference: Any = nf4_dequantize_ref if isinstance(held, NF4Weight) else mxfp4_dequantize_ref
    weights = reference(held).view(experts.shape)
    rows = torch.stack([row @ (weights[e] if back else weights[e].T) for row, e in zip(x, ids.tolist(), strict=True)])
    wide = torch.promote_types(x.dtype, torch.float32)
    return (rows.to(wide) * scale[:, None].to(wide)).to(x.dtype)


@pytest.mark.parametrize(*pairwise(kind=["nf4", "nested", "mxfp4"], spread=SPREADS, back=[False, True], **{
    "device,dtype": [pytest.param("cpu", torch.float32, marks=interpreted), *IN_16_BITS]
}))
@pytest.mark.every(2)
def test_products_are_those_of_each_place_by_itself(
    kind: str, spread: str, back: bool, device: str, dtype: torch.dtype
) -> None:
    ids = SPREADS[spread].to(device)
    experts = stack(6, 70, 192, kind, dtype, device)  # 70: no multiple of a tile
    x = random(len(ids), 70 if back else 192, seed=1, dtype=dtype, device=device)
    scale = random(len(ids), seed=2, device=device)
    found = experts.weight.grouped(x, 6, Places.from_ids(ids, 6), 1, scale, back)
    truth = by_definition(x.double(), experts, ids, back, scale)
    assert_as_accurate("out", found, by_definition(x, experts, ids, back, scale), truth,
                       1e-6 if dtype == torch.float32 else 2**-11)


@interpreted
@every_row("kind", ["nested", "mxfp4"])
def test_several_places_of_a_row_read_it_by_index(kind: str) -> None:
    ids, experts = torch.tensor([[2, 0], [1, 2], [0, 1]]), stack(3, 64, 64, kind)
    x, ones = random(3, 64), torch.ones(6)
    found = experts.weight.grouped(x, 3, Places.from_ids(ids.flatten(), 3), 2)
    wanted = by_definition(x.repeat_interleave(2, 0), experts, ids.flatten(), False, ones)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@every_row("spread", SPREADS)
def test_each_place_is_in_one_tile_of_its_expert_and_tiles_are_no_more_than_the_grid(spread: str) -> None:
    ids = SPREADS[spread]
    places, seen = Places.from_ids(ids, 6), []
    for expert in range(6):
        begin, end = places.ends[expert : expert + 2].tolist()
        tiles = (places.tiles[expert + 1] - places.tiles[expert]).item()
        assert tiles == -(-(end - begin) // places.block)
        assert set(ids[places.order[begin:end]].tolist()) <= {expert}
        seen += places.order[begin:end].tolist()
    assert sorted(seen) == list(range(len(ids)))
    assert places.tiles[-1] <= places.most and places.block == block_rows(len(ids), 6)


def test_only_weights_in_whole_blocks_of_64_are_taken() -> None:
    x = SimpleNamespace(is_cuda=True, dtype=torch.float16, device=torch.device("cpu"))  # capability 80
    for kind, columns in product(("nested", "mxfp4"), (128, 96)):
        assert stack(2, 8, columns, kind).weight.can_group(x) == (columns == 128)


@pytest.mark.parametrize(("device", "dtype"), [
    pytest.param("cpu", torch.float32, marks=interpreted), *IN_16_BITS])
@pytest.mark.parametrize("kind", ["nested", "mxfp4"])
@pytest.mark.parametrize("size", [(1, (8, 8, 128, 64)), (63, (5, 3, 192, 64))])
@pytest.mark.every(2)
def test_routed_experts_through_the_kernels_are_as_accurate_as_the_reference(
    size: tuple[int, tuple[int, int, int, int]], device: str, dtype: torch.dtype, kind: str
) -> None:
    given = problem(*size, kind, dtype, device)
    x, weights = given["x"].detach(), given["weights"].detach()
    grad = random(*x.shape, seed=7, dtype=dtype, device=device)
    rest = given["ids"], weights, Matrices(given["gate_up"]), Matrices(given["down"])
    found = dict(zip(("x", "weights"), grouped_backward(grad, x, *rest), strict=True), y=grouped_forward(x, *rest))
    reference, truth = (outcome(routed_experts_ref, same) for same in (given, in_float64(given)))
    epsilon = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2  # the result is rounded once more
    assert_each_as_accurate(found, reference, truth, epsilon)
