"""rope against float64 truth, against transformers bit for bit, and the memory it takes."""

import importlib
from itertools import product
from typing import Any

import pytest
import torch
from accuracy import assert_each_as_accurate, in_triton, interpreted
from card import CARD, DEVICES, HALVES
from memory import LiveStorage
from torch import Tensor
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from lowmem_grpo.kernels.rope import rope, rope_ref

module = importlib.import_module("lowmem_grpo.kernels.rope")  # the package gives its function this name
FLOAT32 = 1e-6  # slack for products contracted into one step, relative to the largest value
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Q_HEADS, K_HEADS = 6, 2
SHAPES = [  # batch, tokens, head width, turning columns, batch of cos and sin (0: none)
    (1, 1, 2, 2, 1), (2, 63, 8, 8, 2), (2, 7, 10, 6, 1), (1, 500, 16, 16, 0), (3, 5, 96, 72, 3), (2, 3, 256, 256, 0),
]


def problem(
    shape: tuple[int, ...], dtype: torch.dtype, heads_first: bool = True, angle_dtype: Any = None, device: Any = "cpu"
) -> dict[str, Tensor]:
    """q, k, cos, sin and gradients of the results; both halves of cos and sin differ, as they may."""
    batch, tokens, width, turning, angle_batch = shape
    generator = torch.Generator().manual_seed(tokens)

    def heads(count: int) -> Tensor:
        x = torch.randn(batch, tokens, count, width, generator=generator)
        return (x.transpose(1, 2).contiguous() if heads_first else x).to(device, dtype)

    angle = 3 * torch.randn(*([angle_batch] if angle_batch else []), tokens, turning, generator=generator)
    cos, sin = (values.to(device, angle_dtype or dtype) for values in (angle.cos(), angle.sin()))
    return {"q": heads(Q_HEADS), "k": heads(K_HEADS), "cos": cos, "sin": sin,
            "grad_q": heads(Q_HEADS), "grad_k": heads(K_HEADS)}


def outcome(function: Any, tensors: dict[str, Tensor], dtype: Any = None, **options: Any) -> dict[str, Tensor]:
    """Turned q and k and the gradients of q and k."""
    q, k, cos, sin, grad_q, grad_k = (values.to(dtype) for values in tensors.values())
    leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
    results = function(*(leaf * 1 for leaf in leaves), cos, sin, **options)  # not leaves, as in a model
    found = torch.autograd.grad(results, leaves, [grad_q, grad_k])
    return dict(zip(("q", "k", "grad_q", "grad_k"), (*results, *found), strict=True))


def assert_accurate(tensors: dict[str, Tensor], heads_first: bool, ours: dict[str, Tensor]) -> None:
    truth = outcome(rope_ref, tensors, torch.float64, heads_first=heads_first)
    reference = outcome(rope_ref, tensors, heads_first=heads_first)
    assert_each_as_accurate(ours, reference, truth, FLOAT32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_no_larger_than_the_references(dtype: torch.dtype, device: torch.device) -> None:
    larger, angle_dtypes = [(2, 1025, 128, 128, 1), (1, 4099, 128, 96, 1)], (None, torch.float32)
    shapes, angle_dtypes = (SHAPES + larger, angle_dtypes) if device == CARD else (SHAPES, angle_dtypes[:1])
    for shape, heads_first, angle_dtype in product(shapes, (True, False), angle_dtypes):
        tensors = problem(shape, dtype, heads_first, angle_dtype, device)
        assert_accurate(tensors, heads_first, outcome(rope, tensors, heads_first=heads_first))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES)
def test_results_and_gradients_are_those_of_transformers_bit_for_bit(dtype: torch.dtype, device: torch.device) -> None:
    """Phi-3's, which turns a part of the columns; a scaling of the frequencies is in cos and sin."""
    tensors = problem((2, 65, 96, 72, 2), dtype, device=device)
    theirs, mine = outcome(modeling_phi3.apply_rotary_pos_emb, tensors), outcome(rope, tensors)
    for name, values in theirs.items():
        assert torch.equal(mine[name], values), name


@interpreted
@pytest.mark.parametrize(("shape", "heads_first"), [
    (SHAPES[0], True), ((1, 9, 8, 8, 1), False), ((2, 3, 10, 6, 2), True), ((2, 3, 10, 6, 2), False),
    ((1, 5, 96, 72, 0), True), (SHAPES[-1], False),
])
@pytest.mark.every(2)
def test_the_kernels_errors_are_no_larger_than_the_references(shape: tuple[int, ...], heads_first: bool) -> None:
    tensors = problem(shape, torch.float32, heads_first)
    with in_triton():
        assert_accurate(tensors, heads_first, outcome(rope, tensors, heads_first=heads_first))


@interpreted
def test_the_kernels_turn_more_heads_than_fit_a_tile() -> None:
    q, k, grad_q, grad_k = (torch.randn(1, heads, 2, 512) for heads in (9, 5, 9, 5))
    angle = torch.randn(2, 512)
    tensors = {"q": q, "k": k, "cos": angle.cos(), "sin": angle.sin(), "grad_q": grad_q, "grad_k": grad_k}
    assert module.launch_rule(256).constexprs["BLOCK_H"] < 5
    with in_triton():
        assert_accurate(tensors, True, outcome(rope, tensors))


@interpreted
def test_the_kernel_rounds_each_product_as_transformers_does_and_once_with_float32_angles() -> None:
    for angle_dtype, least in ((None, 1.0), (torch.float32, 0.999)):  # float32 sums may differ in the last bit
        tensors = problem((2, 3, 64, 64, 2), torch.float16, angle_dtype=angle_dtype)
        theirs = outcome(modeling_llama.apply_rotary_pos_emb, tensors)
        with in_triton():
            mine = outcome(rope, tensors)
        for name in theirs if angle_dtype is None else ("q", "k"):
            assert (mine[name] == theirs[name].half()).double().mean() >= least, name


@interpreted
def test_the_kernels_read_and_write_by_strides() -> None:
    tensors = problem((2, 2, 10, 6, 2), torch.float32)
    cos, sin = tensors["cos"].mT.contiguous().mT, tensors["sin"]
    packed = torch.cat((tensors["q"], tensors["k"]), 1).transpose(1, 2).contiguous().transpose(1, 2)
    q, k = packed.split((Q_HEADS, K_HEADS), 1)  # as a fused projection gives them
    with in_triton():
        expected = rope(tensors["q"], tensors["k"], tensors["cos"], sin)
        for first in (q.mT.contiguous().mT, torch.stack((q, q), 2).flatten(1, 2)[:, ::2], q):
            assert all(map(torch.equal, rope(first, k, cos, sin), expected))


@pytest.mark.parametrize("dtype", HALVES)
def test_float32_angles_give_transformers_result_rounded_once(dtype: torch.dtype) -> None:
    tensors = problem((2, 9, 16, 16, 2), dtype, angle_dtype=torch.float32)
    theirs = modeling_llama.apply_rotary_pos_emb(*list(tensors.values())[:4])
    ours = rope(*list(tensors.values())[:4])
    for mine, other in zip(ours, theirs, strict=True):
        assert other.dtype == torch.float32 and mine.dtype == dtype and torch.equal(mine, other.to(dtype))
    for mine, reference in zip(ours, rope_ref(*list(tensors.values())[:4]), strict=True):
        assert reference.dtype == dtype and torch.equal(mine, reference)


def test_packed_tokens_are_turned_like_a_batch_of_one() -> None:
    tensors = problem((1, 63, 16, 12, 1), torch.float32, heads_first=False)
    expected = outcome(rope, tensors, heads_first=False)
    packed = {name: values[0] for name, values in tensors.items()}
    for angle in (packed, packed | {name: tensors[name] for name in ("cos", "sin")}):
        for name, values in outcome(rope, angle, heads_first=False).items():
            assert torch.equal(values, expected[name][0]), name
        for name, values in outcome(rope_ref, angle, heads_first=False).items():
            assert torch.equal(values, expected[name][0]), name


def test_results_keep_the_layout_of_the_projections() -> None:
    q, k, cos, sin, *_ = problem((2, 7, 10, 6, 2), torch.float32).values()
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    for x in rope(q, k, cos, sin):
        assert x.transpose(1, 2).is_contiguous()


def test_gradients_shared_with_others_stay_as_they_are() -> None:
    tensors = problem((2, 7, 10, 10, 2), torch.float32)
    q, k = tensors["q"].requires_grad_(), tensors["k"].requires_grad_()
    turned = rope(q, k, tensors["cos"], tensors["sin"])
    grads = tensors["grad_q"].clone(), tensors["grad_k"].clone()
    torch.autograd.grad(turned, (q, k), grads)
    assert torch.equal(grads[0], tensors["grad_q"]) and torch.equal(grads[1], tensors["grad_k"])


def test_only_the_results_are_made_and_in_backward_the_gradients() -> None:
    tensors = problem((2, 63, 16, 16, 2), torch.bfloat16)
    q, k = tensors["q"].requires_grad_(), tensors["k"].requires_grad_()
    both = q.nbytes + k.nbytes
    with LiveStorage() as storage:
        turned = rope(q, k, tensors["cos"], tensors["sin"])
        assert storage.live == storage.peak == both
        torch.autograd.grad(turned, (q, k), (tensors["grad_q"], tensors["grad_k"]))
    assert storage.peak == 2 * both


def test_no_tokens_give_no_results_and_no_k_heads_turn_q_alone() -> None:
    none = problem((2, 0, 10, 6, 2), torch.float32)
    assert outcome(rope, none)["grad_q"].shape == (2, Q_HEADS, 0, 10)
    some = problem((2, 7, 10, 6, 2), torch.float32)
    expected = rope(*list(some.values())[:4])[0]
    q, k = rope(some["q"], some["k"][:, :0], some["cos"], some["sin"])
    assert torch.equal(q, expected) and k.shape == (2, 0, 7, 10)
