"""Linear layers and MLPs with LoRA over frozen weights: accuracy, memory, and what autograd may do with them."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from accuracy import ROUNDING, assert_each_as_accurate, in_float64
from accuracy import outcome as outcome_of
from card import DEVICES, gpu
from memory import CountedOps, LiveStorage
from nf4_problem import in_4_bit
from tables import every_row
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowmem_grpo.kernels.glu import APPROXIMATE
from lowmem_grpo.kernels.lora import LoRA, lora_linear, lora_linear_ref
from lowmem_grpo.kernels.lora_mlp import lora_mlp, lora_mlp_ref

IN, INNER = 63, 130  # odd, and no multiple of a block
outcome = partial(outcome_of, drawn=torch.float64)
SMALL = {torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float16: torch.float16}  # dtype of LoRA


def adapter(size_out: int, size_in: int, dtype: torch.dtype, seed: int, rank: int = 5) -> LoRA:
    """A LoRA pair of which both halves matter."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, size_in, generator=generator) / size_in**0.5
    b = torch.randn(size_out, rank, generator=generator) / rank**0.5
    return LoRA(a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_(), 0.7)


def mlp_problem(rows: int, dtype: torch.dtype, fused: bool = False) -> dict[str, Any]:
    """Arguments of lora_mlp; `fused` puts gate and up in one matrix."""
    generator = torch.Generator().manual_seed(rows)

    def weight(size_out: int, size_in: int) -> Tensor:
        return (torch.randn(size_out, size_in, generator=generator) / size_in**0.5).to(dtype)

    arguments: dict[str, Any] = {"x": torch.randn(rows, IN, generator=generator).to(dtype).requires_grad_()}
    gate_size = 2 * INNER if fused else INNER
    arguments |= {"gate": weight(gate_size, IN), "gate_lora": adapter(gate_size, IN, SMALL[dtype], 1)}
    arguments["up"] = None if fused else weight(INNER, IN)
    arguments["up_lora"] = None if fused else adapter(INNER, IN, SMALL[dtype], 2)
    return arguments | {"down": weight(IN, INNER), "down_lora": adapter(IN, INNER, SMALL[dtype], 3)}


def assert_no_worse(arguments: dict[str, Any], ours: dict[str, Tensor], dtype: torch.dtype, **options: Any) -> None:
    reference, truth = (outcome(lora_mlp_ref, same, **options) for same in (arguments, in_float64(arguments)))
    assert_each_as_accurate(ours, reference, truth, 2 * ROUNDING[dtype])


def placed(value: Any, device: Any) -> Any:
    """A tensor or a LoRA pair on a device."""
    if isinstance(value, LoRA):
        return LoRA(placed(value.a, device), placed(value.b, device), value.scale)
    return value.detach().to(device).requires_grad_(value.requires_grad) if torch.is_tensor(value) else value


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_mlp_errors_are_no_larger_than_the_references(dtype: torch.dtype, device: torch.device) -> None:
    for rows, fused, tile_rows in product((1, 63, 500), (False, True), (None, 64)):
        arguments = mlp_problem(rows, dtype, fused)
        there = {name: placed(value, device) for name, value in arguments.items()}
        ours = outcome(lora_mlp, there, tile_rows=tile_rows)
        assert_no_worse(arguments, {name: value.cpu() for name, value in ours.items()}, dtype)


@every_row("activation", APPROXIMATE)
@every_row("fused", [False, True])
def test_mlp_gradients_are_the_derivatives(activation: str, fused: bool) -> None:
    arguments = in_float64(mlp_problem(2, torch.float32, fused))
    loras = {name: value for name, value in arguments.items() if isinstance(value, LoRA)}

    def run(x: Tensor, *tensors: Tensor) -> Tensor:
        pairs = zip(loras, tensors[::2], tensors[1::2], strict=True)
        changed = {name: LoRA(a, b, 0.7) for name, a, b in pairs}
        return lora_mlp(**(arguments | changed | {"x": x}), activation=activation, tile_rows=1)

    tensors = [tensor for lora in loras.values() for tensor in (lora.a, lora.b)]
    assert torch.autograd.gradcheck(run, (arguments["x"], *tensors), fast_mode=True)


@pytest.mark.parametrize("without", ["gate_lora", "up_lora", "down_lora"])
def test_mlp_layers_without_lora_are_plain_and_batches_of_sequences_are_taken(without: str) -> None:
    arguments = mlp_problem(60, torch.float32) | {without: None}
    ours = outcome(lora_mlp, arguments)
    assert_no_worse(arguments, ours, torch.float32)
    batched = arguments | {"x": arguments["x"].detach().view(3, 20, IN).requires_grad_()}
    torch.testing.assert_close(lora_mlp(**batched).flatten(0, 1), ours["y"])


@pytest.mark.parametrize("tile_rows", [None, 64])
def test_mlp_keeps_gate_and_up_or_nothing(tile_rows: int | None) -> None:
    arguments = mlp_problem(500, torch.bfloat16)
    with LiveStorage() as storage:
        y = lora_mlp(**arguments, tile_rows=tile_rows)
    assert storage.live == y.nbytes + (0 if tile_rows else 2 * 500 * INNER * 2)


def test_mlp_backward_makes_one_buffer_of_the_inner_size() -> None:
    arguments = mlp_problem(500, torch.float32)
    y = lora_mlp(**arguments)
    inner, ranks = 500 * INNER * 4, 4 * 3 * 5 * (500 + 2 * INNER)
    with LiveStorage() as storage:
        torch.autograd.grad(y, arguments["x"], torch.ones_like(y))
    assert storage.peak < inner + 3 * y.nbytes + 2 * ranks  # dy, dx and one share of it


def test_tiles_bound_what_forward_and_backward_make() -> None:
    arguments = mlp_problem(500, torch.float32)
    tile, ranks = 20 * INNER * 4, 4 * 3 * 5 * (500 + 4 * INNER)
    with LiveStorage() as storage:
        y = lora_mlp(**arguments, tile_rows=20)
    assert storage.peak < y.nbytes + 4 * tile + ranks
    with LiveStorage() as storage:
        torch.autograd.grad(y, arguments["x"], torch.ones_like(y))
    assert storage.peak < 2 * y.nbytes + 5 * tile + ranks  # dy, dx


def test_a_checkpoint_around_a_tiled_mlp_computes_it_only_once_more_in_tiles() -> None:
    arguments = mlp_problem(60, torch.float32)
    found = []
    for around in (lambda run: run(), lambda run: checkpoint(run, use_reentrant=False)):
        y = around(lambda: lora_mlp(**arguments, tile_rows=20))
        with CountedOps() as ops:
            (grad,) = torch.autograd.grad(y.sum(), arguments["x"])
        found.append((sum(name.startswith(("aten::mm", "aten::addmm")) for name in ops.names), grad))
    assert found[0][0] == found[1][0] > 0
    assert torch.equal(found[0][1], found[1][1])


@every_row("dtype", ROUNDING)
@every_row("four_bit", [False, True])
def test_a_bias_is_added_and_changes_no_gradient(dtype: torch.dtype, four_bit: bool) -> None:
    arguments, bias = mlp_problem(63, dtype), torch.randn(INNER).to(dtype)
    x, weight, lora = arguments["x"], arguments["gate"], arguments["gate_lora"]
    if four_bit:
        weight = in_4_bit(weight, double=True)
    (plain,) = lora_linear(x, [weight], [lora])
    (biased,) = lora_linear(x, [weight], [lora], [bias])
    torch.testing.assert_close(biased, plain + bias, rtol=4 * ROUNDING[dtype], atol=4 * ROUNDING[dtype])
    both = [torch.autograd.grad(y.sum(), (x, lora.a, lora.b)) for y in (plain, biased)]
    assert all(torch.equal(*pair) for pair in zip(*both, strict=True))


def test_a_second_backward_is_refused_through_used_buffers_and_gives_the_same_through_tiles() -> None:
    arguments = mlp_problem(7, torch.float32)
    y, tiled = lora_mlp(**arguments), lora_mlp(**arguments, tile_rows=3)
    torch.autograd.grad(y.sum(), arguments["x"], retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), arguments["x"])
    first, second = (torch.autograd.grad(tiled.sum(), arguments["x"], retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_q_k_v_on_one_input_give_what_three_layers_give(dtype: torch.dtype) -> None:
    x = torch.randn(63, IN, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    sizes = (64, 32, 31)
    weights = [(torch.randn(size, IN) / 8).to(dtype) for size in sizes]
    loras = [adapter(64, IN, SMALL[dtype], 1), None, adapter(31, IN, SMALL[dtype], 2, rank=3)]

    def together(x: Tensor, q_lora: LoRA, v_lora: LoRA) -> Tensor:
        return torch.cat(lora_linear(x, [weight.to(x.dtype) for weight in weights], [q_lora, None, v_lora]), -1)

    def apart(x: Tensor, q_lora: LoRA, v_lora: LoRA) -> Tensor:
        pairs = zip(weights, (q_lora, None, v_lora), strict=True)
        return torch.cat([lora_linear_ref(x, weight.to(x.dtype), lora) for weight, lora in pairs], -1)

    arguments = {"x": x, "q_lora": loras[0], "v_lora": loras[2]}
    truth, reference = outcome(apart, in_float64(arguments)), outcome(apart, arguments)
    assert_each_as_accurate(outcome(together, arguments), reference, truth, 2 * ROUNDING[dtype])


def test_q_k_v_keep_their_input_once() -> None:
    x = torch.randn(500, IN, requires_grad=True)
    weights = [torch.randn(32, IN) for _ in range(3)]
    loras = [adapter(32, IN, torch.float32, seed) for seed in range(3)]
    with LiveStorage() as storage:
        outputs = lora_linear(x, weights, loras)
    assert storage.live == sum(output.nbytes for output in outputs)


def test_an_output_that_is_not_used_adds_no_gradient() -> None:
    x = torch.randn(7, IN, requires_grad=True)
    weights = [torch.randn(32, IN) for _ in range(2)]
    loras = [adapter(32, IN, torch.float32, seed) for seed in range(2)]
    first, _ = lora_linear(x, weights, loras)
    grad_x, unused = torch.autograd.grad(first.sum(), [x, loras[1].a], allow_unused=True)
    expected = torch.autograd.grad(lora_linear_ref(x, weights[0], loras[0]).sum(), x)[0]
    torch.testing.assert_close(grad_x, expected)
    assert unused is None or not unused.any()


@pytest.mark.parametrize("tile_rows", [None, 64])
@pytest.mark.slow
def test_compiled_mlp_gives_what_the_eager_one_gives(tile_rows: int | None) -> None:
    arguments = mlp_problem(63, torch.float32)
    compiled = torch.compile(lora_mlp, backend="aot_eager", fullgraph=True)
    expected = outcome(lora_mlp, arguments, tile_rows=tile_rows)
    for name, value in outcome(compiled, arguments, tile_rows=tile_rows).items():
        torch.testing.assert_close(value, expected[name], msg=name)


@every_row("tile_rows", [None, 2])
def test_no_rows_give_no_outputs_and_gradients_of_zero(tile_rows: int | None) -> None:
    results = outcome(lora_mlp, mlp_problem(0, torch.float32), tile_rows=tile_rows)
    assert results["y"].shape == (0, IN) and not results["gate_lora.a"].any()


@every_row("tile_rows", [None, 20])
def test_autocast_around_the_call_and_its_backward_changes_nothing(tile_rows: int | None) -> None:
    arguments = mlp_problem(60, torch.float32)
    arguments["gate_lora"] = replace(arguments["gate_lora"], scale=0.5)  # with other scales, products are scaled apart
    plain = outcome(lora_mlp, arguments, tile_rows=tile_rows)
    with torch.autocast("cpu", torch.bfloat16):
        ours = outcome(lora_mlp, arguments, tile_rows=tile_rows)
        with torch.no_grad():
            assert torch.equal(lora_mlp(**arguments, tile_rows=tile_rows), plain["y"])
    for name, value in plain.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_linear_errors_are_no_larger_than_the_references(dtype: torch.dtype, device: torch.device) -> None:
    """Of a plain weight; test_frozen.py has those in NF4 and FP8."""
    for rows in (1, 8, 63, 500):
        generator = torch.Generator().manual_seed(rows)
        weight = (torch.randn(INNER, 2 * IN, generator=generator) / IN**0.5).to(device, dtype)
        x = torch.randn(rows, 2 * IN, generator=generator).to(device, dtype).requires_grad_()
        arguments = {"x": x, "weight": weight, "lora": placed(adapter(INNER, 2 * IN, SMALL[dtype], 1), device)}
        ours = outcome(lambda x, weight, lora: lora_linear(x, [weight], [lora])[0], arguments)
        reference, truth = (outcome(lora_linear_ref, given) for given in (arguments, in_float64(arguments)))
        assert_each_as_accurate(ours, reference, truth, 2 * ROUNDING[dtype], f"of {rows} rows")


@gpu
def test_on_a_card_scratch_memory_is_nan_in_these_tests() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.empty(1000, dtype=dtype, device="cuda").isnan().all()
