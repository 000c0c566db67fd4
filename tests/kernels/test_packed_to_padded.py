"""Packed tokens side by side and back: sums over copies against float64 truth, in one order, in one launch."""

import importlib
from itertools import product

import pytest
import torch
from accuracy import assert_as_accurate, in_triton, interpreted
from card import gpu
from memory import CountedOps, LiveStorage
from packed_problem import batch_of
from torch import Tensor

from lowmem_grpo.kernels.packed_to_padded import (
    packed_to_padded,
    packed_to_padded_ref,
    padded_to_packed,
    padded_to_packed_ref,
)
from lowmem_grpo.types import MicroBatch

module = importlib.import_module("lowmem_grpo.kernels.packed_to_padded")
ROUNDING = {torch.float32: 2e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of a sum, once, when stored
HEADS = [(4, 2, 2), (3, 1, 1), (1, 1, 1), (5,), (4, 2)]
SIZES = [16, 7, 80]  # of a head
PACKS = {  # (prompt, completions) of each group
    "one group": [(9, [5, 12, 1, 12])], "three groups": [(4, [3, 2]), (33, [40, 7, 1]), (2, [6])],
    "no shared places": [(1, [5, 3]), (3, [4])], "many copies": [(30, [2] * 40)],
}


def problem(
    batch: MicroBatch, heads: tuple[int, ...], size: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[list[Tensor], list[Tensor]]:
    """Packed tensors (T, H, K) as attention gets them, and gradients (S, H, W, K) that end where a sequence does."""
    generator = torch.Generator().manual_seed(len(batch.input_ids) + size)
    count, width = len(batch.cu_seqlens) - 1, batch.max_seqlen
    ends = torch.arange(width) < batch.cu_seqlens.diff()[:, None]
    packed = [torch.randn(len(batch.input_ids), one, size, generator=generator) for one in heads]
    grads = [torch.randn(count, width, one, size, generator=generator) * ends[:, :, None, None] for one in heads]
    return ([one.to(device, dtype).requires_grad_() for one in packed],
            [one.to(device, dtype).transpose(1, 2) for one in grads])


def tables(batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor, int]:
    return batch.sources, batch.places, batch.copies, batch.max_seqlen


def assert_spread_accurate(batch: MicroBatch, packed: list[Tensor], grads: list[Tensor], sums: list[Tensor]) -> None:
    """`sums` are the gradients of spreading, as near to float64 as those of torch's own operations."""
    found = []
    for dtype in (packed[0].dtype, torch.float64):
        given = [one.detach().to(dtype).requires_grad_() for one in packed]
        results = packed_to_padded_ref(given, batch.sources, batch.max_seqlen)
        found.append(torch.autograd.grad(results, given, [grad.to(dtype) for grad in grads]))
    for number, (ours, reference, truth) in enumerate(zip(sums, *found, strict=True)):
        assert ours.dtype == packed[0].dtype
        assert_as_accurate(f"tensor {number}", ours, reference, truth, ROUNDING[ours.dtype])


def assert_there_and_back(name: str, heads: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
    """Copies are exact, their gradients add up as well as in float64; gathering takes each place once."""
    batch = batch_of(PACKS[name])
    packed, grads = problem(batch, heads, size, dtype)
    results = packed_to_padded(packed, *tables(batch))
    for ours, reference in zip(results, packed_to_padded_ref(packed, batch.sources, batch.max_seqlen), strict=True):
        assert torch.equal(ours, reference), (dtype, heads)
    assert_spread_accurate(batch, packed, grads, list(torch.autograd.grad(results, packed, grads)))
    side_by_side = grads[0].requires_grad_()
    ours = padded_to_packed(side_by_side, batch.sources, batch.places)
    reference = padded_to_packed_ref(side_by_side, batch.places)
    assert torch.equal(ours, reference), dtype
    back = [torch.autograd.grad(one, side_by_side, packed[0].detach())[0] for one in (ours, reference)]
    assert torch.equal(*back), dtype


@pytest.mark.parametrize("name", PACKS)
def test_copies_are_exact_and_their_gradients_add_up_as_well_as_in_float64(name: str) -> None:
    for dtype, heads in product(ROUNDING, HEADS):
        assert_there_and_back(name, heads, 16, dtype)


def test_a_shared_prompts_gradient_in_bf16_is_rounded_once() -> None:
    batch = batch_of(PACKS["many copies"])
    packed, grads = problem(batch, (2,), 16, torch.bfloat16)
    (sums,) = torch.autograd.grad(packed_to_padded(packed, *tables(batch)), packed, grads)
    wide = [packed[0].detach().double().requires_grad_()]
    padded = packed_to_padded_ref(wide, batch.sources, batch.max_seqlen)
    (exact,) = torch.autograd.grad(padded, wide, [grads[0].double()])
    assert torch.equal(sums, exact.to(torch.bfloat16))


@interpreted
@pytest.mark.parametrize(("name", "heads", "size"), [
    *((name, (4, 2, 2), 16) for name in PACKS), *(("three groups", heads, 7) for heads in HEADS),
    *(("many copies", (3, 1, 1), size) for size in SIZES),
])
@pytest.mark.every(2)
def test_the_kernels_give_what_the_references_give(name: str, heads: tuple[int, ...], size: int) -> None:
    with in_triton():
        assert_there_and_back(name, heads, size, torch.float32)


@interpreted
def test_the_kernels_read_tensors_by_their_strides() -> None:
    batch = batch_of(PACKS["three groups"])
    packed, grads = problem(batch, (4, 2, 2), 16, torch.float32)
    found = []
    for change in (lambda x: x, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
                   lambda x: torch.cat((x, x), -1)[..., 16:], lambda x: torch.stack((x, x), -1)[..., 0]):
        given = [change(one.detach()).requires_grad_() for one in packed]
        with in_triton():
            results = packed_to_padded(given, *tables(batch))
            found.append([*results, *torch.autograd.grad(results, given, [change(grad) for grad in grads])])
    assert all(torch.equal(one, other) for other in found[1:] for one, other in zip(found[0], other, strict=True))


@interpreted
def test_what_lies_right_of_a_sequences_end_gets_no_gradient_through_the_kernel() -> None:
    batch = batch_of(PACKS["three groups"])
    _, grads = problem(batch, (2,), 16, torch.float32)
    ends = torch.arange(batch.max_seqlen) < batch.cu_seqlens.diff()[:, None]
    dirty = torch.where(ends[:, None, :, None], grads[0], torch.nan)
    clean, unread = (module.sum_copies_triton([one], *tables(batch))[0] for one in (grads[0], dirty))
    assert torch.equal(clean, unread)


@gpu
@pytest.mark.parametrize("dtype", ROUNDING)
def test_gradients_on_a_card_are_as_accurate_and_the_same_each_time(dtype: torch.dtype) -> None:
    for name, size in product(PACKS, (*SIZES, 128, 256)):
        batch = batch_of(PACKS[name]).to("cuda")
        packed, grads = problem(batch_of(PACKS[name]), (4, 2, 2), size, dtype, "cuda")
        runs = [torch.autograd.grad(packed_to_padded(packed, *tables(batch)), packed, grads) for _ in range(3)]
        assert_spread_accurate(batch, packed, grads, list(runs[0]))
        assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(run, runs[0], strict=True))


VIEWS = ("aten::transpose", "aten::view", "aten::detach", "aten::flatten", "aten::reshape", "aten::_unsafe_view",
         "aten::clone")


def test_spreading_several_tensors_and_gathering_take_one_launch_each_way() -> None:
    batch = batch_of(PACKS["one group"])
    packed, grads = problem(batch, (4, 2, 2), 16, torch.float32)
    with CountedOps() as spreading:
        torch.autograd.grad(packed_to_padded(packed, *tables(batch)), packed, grads)
    (side_by_side,) = problem(batch, (3,), 16, torch.float32)[1]
    side_by_side, (grad,) = side_by_side.requires_grad_(), problem(batch, (3,), 16, torch.float32)[0]
    with CountedOps() as gathering:
        torch.autograd.grad(padded_to_packed(side_by_side, batch.sources, batch.places), side_by_side, grad)
    launched = [[name for name in counted.names if name not in VIEWS] for counted in (spreading, gathering)]
    assert launched == [["lowmem_grpo::packed_to_padded", "lowmem_grpo::sum_copies"],
                        ["aten::index_select", "lowmem_grpo::packed_to_padded"]]


@pytest.mark.parametrize("used", [0, 1, 2])
def test_gradients_of_some_of_the_tensors_are_enough(used: int) -> None:
    batch = batch_of(PACKS["three groups"])
    packed, grads = problem(batch, (4, 2, 2), 16, torch.float32)
    ours, reference = (
        torch.autograd.grad(results[used], packed, grads[used], allow_unused=True)
        for results in (packed_to_padded(packed, *tables(batch)),
                        packed_to_padded_ref(packed, batch.sources, batch.max_seqlen))
    )
    for one, other in zip(ours, reference, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other)


def test_nothing_but_the_tables_is_kept() -> None:
    batch = batch_of(PACKS["one group"])
    packed, _ = problem(batch, (32, 8, 8), 16, torch.bfloat16)
    with LiveStorage() as storage:
        results = packed_to_padded(packed, *tables(batch))
    assert storage.live == sum(one.nbytes for one in results)
