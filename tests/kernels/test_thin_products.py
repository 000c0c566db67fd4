"""LoRA's products of all layers on one input in one launch: outputs and every gradient against float64 truth."""

from typing import Any

import pytest
import torch
from accuracy import ROUNDING, assert_as_accurate, assert_each_as_accurate, in_float64, in_triton, interpreted, outcome
from memory import CountedOps
from tables import every_row
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowmem_grpo.kernels import thin_products as module
from lowmem_grpo.kernels.lora import LoRA, lora_linear, lora_linear_ref
from lowmem_grpo.kernels.lora_mlp import lora_mlp, lora_mlp_ref
from lowmem_grpo.kernels.thin_products import Product, multiply

IN, SIZES = 37, (130, 33, 17)  # odd; more than one tile of outputs
OTHER_ORDER = 2 * ROUNDING[torch.float32]  # of a sum and of one of such sums


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def pair(out: int, inside: int, rank: int, scale: float, dtype: torch.dtype = torch.float32) -> LoRA:
    a, b = random(rank, inside, seed=rank) / inside**0.5, random(out, rank, seed=out) / rank**0.5
    return LoRA(a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_(), scale)


def layers(rows: int, ranks: list[int | None], scales: list[float]) -> dict[str, Any]:
    weights = [random(size, IN) / IN**0.5 for size in SIZES]
    pairs = zip(SIZES, ranks, scales, strict=True)
    loras = [None if rank is None else pair(size, IN, rank, scale) for size, rank, scale in pairs]
    return {"x": random(rows, IN).requires_grad_(), "weights": weights, "loras": loras}


def apart(x: Tensor, weights: list[Tensor], loras: list[LoRA | None]) -> tuple[Tensor, ...]:
    return tuple(lora_linear_ref(x, weight.to(x.dtype), lora) for weight, lora in zip(weights, loras, strict=True))


def exact(arguments: dict[str, Any]) -> dict[str, Any]:
    return in_float64(arguments) | {name: [in_float64(one) for one in arguments[name]] for name in ("weights", "loras")}


@interpreted
@every_row(("rows", "ranks", "scales"), [
    (70, [8, 8, 8], [0.7] * 3), (3, [1, None, 5], [2.0] * 3), (33, [64, 5, 8], [0.7, 1.3, 0.7]),
    (150, [None, 1, None], [0.5] * 3),
])
def test_outputs_and_all_gradients_err_no_more_than_the_references(
    rows: int, ranks: list[int | None], scales: list[float]
) -> None:
    arguments = layers(rows, ranks, scales)
    with in_triton():
        ours, again = outcome(lora_linear, arguments), outcome(lora_linear, arguments)
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    assert_each_as_accurate(ours, outcome(apart, arguments), outcome(apart, exact(arguments)), OTHER_ORDER)


@interpreted
@every_row("tile_rows", [None, 20])
def test_an_mlps_gradients_err_no_more_than_the_references(tile_rows: int | None) -> None:
    arguments: dict[str, Any] = {
        "x": random(45, IN).requires_grad_(), "gate": random(65, IN) / 6, "up": random(65, IN, seed=1) / 6,
        "down": random(IN, 65) / 8, "gate_lora": pair(65, IN, 5, 0.7), "up_lora": None,
        "down_lora": pair(IN, 65, 8, 2.0),
    }
    with in_triton():
        ours = outcome(lora_mlp, arguments, tile_rows=tile_rows)
    reference, truth = (outcome(lora_mlp_ref, given) for given in (arguments, in_float64(arguments)))
    assert_each_as_accurate(ours, reference, truth, OTHER_ORDER)


def products(dtype: torch.dtype) -> list[Product]:
    """Products as LoRA has them, also of no rows and of transposed matrices, over outputs of NaN."""
    made = []
    for (m, n, k), scale in (((70, 5, 300), 0.7), ((5, 133, 70), 1.0), ((0, 3, 4), 1.0), ((65, 64, 1), -2.0)):
        left, right = random(k, m).to(dtype).T, (random(n, k).T if m == 70 else random(k, n)).to(dtype)
        made.append((torch.full((m, n), float("nan"), dtype=dtype), left, right, scale))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_of_odd_sizes_over_unset_memory_err_no_more_than_torchs_own(dtype: torch.dtype) -> None:
    ours, given, before = products(dtype), products(dtype), random(70, 5).to(dtype)
    ours[0][0].copy_(before)  # to which the first product is added
    multiply(ours, 1)
    for number, (_, left, right, scale) in enumerate(given):
        plain, exact = (scale * (left.to(kind) @ right.to(kind)) + (0 if number else before.to(kind))
                        for kind in (dtype, torch.float64))
        assert_as_accurate(f"product {number}", ours[number][0], plain, exact, ROUNDING[dtype])


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_errs_no_more_than_torch(dtype: torch.dtype) -> None:
    with in_triton():
        test_products_of_odd_sizes_over_unset_memory_err_no_more_than_torchs_own(dtype)


@interpreted
def test_no_rows_give_gradients_of_zero_and_an_unused_output_gives_none() -> None:
    with in_triton():
        ours = outcome(lora_linear, layers(0, [4, 4, 4], [1.0] * 3))
        assert not any(grad.any() for name, grad in ours.items() if name.startswith("loras"))
        arguments = layers(9, [4, 5, 8], [0.7] * 3)
        y, _, _ = lora_linear(**arguments)
        wanted = [arguments["x"], arguments["loras"][0].a, arguments["loras"][1].a]
        grad_x, grad_a, unused = torch.autograd.grad(y.sum(), wanted, allow_unused=True)
    reference = apart(**arguments)[0]
    expected = torch.autograd.grad(reference.sum(), wanted[:2])
    torch.testing.assert_close([grad_x, grad_a], list(expected))
    assert unused is None or not unused.any()


def test_three_layers_on_one_input_take_two_launches_backward_beside_those_with_weights_and_a() -> None:
    arguments = layers(9, [4, 5, 8], [0.7, 1.3, 0.7])
    with CountedOps() as forward:
        outputs = lora_linear(**arguments)
    with CountedOps() as backward:
        torch.cat(outputs, -1).sum().backward()
    ours = [[name for name in ops.names if name.startswith("lowmem_grpo")] for ops in (forward, backward)]
    assert ours == [["lowmem_grpo::lora_up"], ["lowmem_grpo::thin_products"] * 2]


@every_row(("capability", "rank", "dtype", "one_launch"), [
    (80, 16, torch.bfloat16, True), (120, 64, torch.float16, True), (75, 16, torch.float16, False),
    (90, 256, torch.bfloat16, False), (90, 16, torch.float32, False),
])
def test_cards_without_tensor_cores_for_triton_large_ranks_and_float32_take_products_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capability: int, rank: int, dtype: torch.dtype, one_launch: bool
) -> None:
    monkeypatch.setattr(module, "capability", lambda device: capability)
    with FakeTensorMode():
        lefts, rights = ([torch.empty(shape, dtype=dtype, device="cuda")] for shape in ((2048, 999), (999, rank)))
        assert module.fits(lefts, rights) == one_launch
