"""Routed experts against float64, by the definition of their codes: outputs, gradients, slices, memory, refusals."""

from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from accuracy import ROUNDING, assert_each_as_accurate, in_float64, outcome
from card import DEVICES
from memory import LiveStorage
from mixtures import problem, random, stack
from tables import not_refused

from lowmem_grpo.kernels.expert_matrices import Matrices
from lowmem_grpo.kernels.frozen import FrozenStack
from lowmem_grpo.kernels.frozen_weight import PlainWeight
from lowmem_grpo.kernels.nf4 import NF4Weight, nf4_dequantize_ref
from lowmem_grpo.kernels.routed_experts import routed_experts, routed_experts_ref

routed = import_module("lowmem_grpo.kernels.routed_experts")  # whose function has its name
SIZES = [(1, (16, 16, 64, 16)), (63, (8, 3, 96, 48)), (130, (5, 5, 64, 24))]  # rows, (E, k, D, I)


def flat(given: dict[str, Any]) -> Any:
    return routed.flat(map(Matrices, (given["gate_up"], given["down"])))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.every(2)
def test_errors_are_those_of_the_dequantized_experts(dtype: torch.dtype, device: torch.device) -> None:
    for size, kind in [*product(SIZES, ("plain", "nf4", "nested")), ((63, (8, 3, 96, 32)), "mxfp4")]:
        arguments = problem(*size, kind, dtype, device)
        reference, truth = (outcome(routed_experts_ref, same) for same in (arguments, in_float64(arguments)))
        assert_each_as_accurate(outcome(routed_experts, arguments), reference, truth, ROUNDING[dtype],
                                f"of {kind} experts, {size}")


def test_experts_without_rows_and_rows_in_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = problem(50, (8, 3, 64, 16), idle=3)
    whole = outcome(routed_experts, arguments)
    monkeypatch.setattr(routed, "PIECE", 7)
    torch.testing.assert_close(outcome(routed_experts, arguments), whole)


@pytest.mark.parametrize("asked", ["x", "weights"])
def test_one_gradient_without_the_other_is_the_same(asked: str) -> None:
    arguments = problem(9, (4, 2, 64, 16))
    expected = outcome(routed_experts, arguments)[asked]
    other = "weights" if asked == "x" else "x"
    assert torch.equal(outcome(routed_experts, arguments | {other: arguments[other].detach()})[asked], expected)


@pytest.mark.parametrize(("out", "columns"), [(32, 64), (6, 96), (96, 40)])  # nested blocks: 256 blocks of 64 weights
def test_an_expert_is_a_slice_of_the_stack_without_a_copy(out: int, columns: int) -> None:
    whole = stack(9, out, columns, "nested")
    assert isinstance(whole.weight, NF4Weight)
    values = nf4_dequantize_ref(whole.weight).view(9, out, columns)
    for number in range(9):
        part = whole.expert(number)
        assert isinstance(part, NF4Weight)
        assert torch.equal(nf4_dequantize_ref(part), values[number])
        assert part.packed.untyped_storage().data_ptr() == whole.weight.packed.untyped_storage().data_ptr()


def test_experts_that_share_a_block_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"expert of 5 x 32 .* a block of weights in nf4 ends.*16 bits"):
        stack(4, 5, 32, "nested")
    with pytest.raises(ValueError, match=r"weight \(E \* out, in\) of E = 3 experts; got shape \(8, 32\)"):
        FrozenStack(PlainWeight(torch.zeros(8, 32)), 3)


def test_only_one_expert_is_decoded_at_a_time_and_nothing_of_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 experts of 3 x 128 x 256 weights are 6 MiB in bfloat16; one is 192 KiB."""
    monkeypatch.setattr("lowmem_grpo.kernels.nf4.REFERENCE_ELEMENTS", 2**12)  # temporaries of the CPU path
    arguments = problem(40, (32, 2, 256, 128), dtype=torch.bfloat16)
    one, sums = 2 * 3 * 128 * 256, 40 * 4 * 256
    stacks = flat(arguments)
    x, weights = arguments["x"].detach(), arguments["weights"].detach()
    with LiveStorage() as kept:
        y = routed_experts(**arguments)
        del y
    assert kept.live <= sums  # nothing of an expert
    for function, grads in ((routed.routed_forward, ()), (routed.routed_backward, (x,))):
        with LiveStorage() as inside:  # of the operation, which does not show what it holds inside
            function(*grads, x, arguments["ids"], weights, *stacks)
        assert one < inside.peak <= 1.5 * one + 4 * sums


def test_a_checkpoint_does_not_compute_the_result_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    operation = routed.routed_forward_op
    monkeypatch.setattr(routed, "routed_forward_op", lambda *given: calls.append(0) or operation(*given))
    arguments = problem(9, (4, 2, 64, 16))
    fixed = {name: arguments[name] for name in ("ids", "gate_up", "down")}

    def layer(x: Any, weights: Any) -> Any:
        return routed_experts(x * 1, weights=weights * 1, **fixed)

    y = torch.utils.checkpoint.checkpoint(layer, arguments["x"], arguments["weights"], use_reentrant=False)
    y.sum().backward()
    assert len(calls) == 1 and arguments["x"].grad.any()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": random(9, 63)}, "expected x (T, 64)"),
    ({"ids": torch.zeros(9, 2)}, "expected ids (9, k) of an integer dtype"),
    ({"ids": torch.zeros(9, 5, dtype=torch.long)}, "k at most 4"),
    ({"weights": torch.zeros(9, 2, dtype=torch.bfloat16)}, "expected weights (9, 2) in torch.float32"),
    ({"down": stack(4, 64, 8, "plain")}, "expected gate_up (E, 2 I, D) and down (E, D, I)"),
]


def test_what_does_not_fit_is_refused_by_name() -> None:
    assert not_refused(lambda change: routed_experts(**(problem(9, (4, 2, 64, 16)) | change)), REFUSED) == []


@pytest.mark.parametrize("kind", ["plain", "nested"])
def test_torch_sees_one_operation_each_way(kind: str) -> None:
    given = problem(9, (4, 2, 64, 16), kind)
    x, weights = given["x"].detach(), given["weights"].detach()
    stacks = flat(given)
    for operation, arguments in ((routed.routed_forward_op, (x, given["ids"], weights)),
                                 (routed.routed_backward_op, (x, x, given["ids"], weights))):
        torch.library.opcheck(operation, (*arguments, *stacks), test_utils=("test_schema", "test_faketensor"))


def test_a_stack_of_another_dtype_is_decoded_into_that_of_the_rows() -> None:
    arguments = problem(9, (4, 2, 64, 16), "plain")
    half, exact = ({name: replace(arguments[name], weight=PlainWeight(
        arguments[name].weight.tensor.bfloat16().to(dtype))) for name in ("gate_up", "down")}
        for dtype in (torch.bfloat16, torch.float32))
    assert torch.equal(routed_experts(**(arguments | half)), routed_experts(**(arguments | exact)))
