"""Adapters while sampling and between optimizer steps: converted once, with the same bits, and never out of date."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory import CountedOps
from nf4_problem import quantized
from tables import every_row
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lowmem_grpo.kernels.frozen_weight import WIDE, WideWeights
from lowmem_grpo.kernels.lora import lora_linear
from lowmem_grpo.kernels.lora_factors import (
    KEPT,
    LoRA,
    SharedFactors,
    convert_again,
    held_factors,
    kept_factors,
    shared_factors,
)
from lowmem_grpo.kernels.lora_mlp import lora_mlp
from lowmem_grpo.kernels.lora_up import ONE_PRODUCT
from lowmem_grpo.kernels.nf4 import NF4Weight, nf4_dequantize

IN, OUT, INNER, RANK = 24, 40, 56, 4
DTYPES = [torch.float32, torch.bfloat16]


def pair(out: int, inside: int, seed: int) -> LoRA:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(RANK, inside, generator=generator), torch.randn(out, RANK, generator=generator)
    return LoRA(a.requires_grad_(), b.requires_grad_(), 0.7)


def given(dtype: torch.dtype, rows: int = 3) -> tuple[Tensor, list[Tensor], list[LoRA | None]]:
    """x, the weights of three layers on it, and their pairs; the second has none."""
    torch.manual_seed(1)
    return (torch.randn(rows, IN).to(dtype), [torch.randn(OUT, IN).to(dtype) for _ in range(3)],
            [pair(OUT, IN, 2), None, pair(OUT, IN, 3)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_are_those_of_pairs_converted_in_each_pass_bit_for_bit(dtype: torch.dtype) -> None:
    x, weights, loras = given(dtype)
    with torch.no_grad():
        expected = lora_linear(x, weights, loras)
        with kept_factors() as kept:
            for _ in range(2):
                found = lora_linear(x, weights, loras)
                assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
            assert len(kept) == 1
    trained = lora_linear(x, weights, loras)
    assert all(torch.equal(one, other.detach()) for one, other in zip(expected, trained, strict=True))


@every_row("dtype", DTYPES)
@every_row("tile_rows", [None, 2, 8])
def test_an_mlp_without_gradient_gives_what_it_gives_in_training(dtype: torch.dtype, tile_rows: int | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, IN).to(dtype)
    gate, up, down = (torch.randn(shape).to(dtype) for shape in ((INNER, IN), (INNER, IN), (IN, INNER)))
    given = {"up": up, "down": down, "gate_lora": pair(INNER, IN, 4), "up_lora": pair(INNER, IN, 5),
             "down_lora": pair(IN, INNER, 6)}

    def output(rows: int | None = tile_rows) -> Tensor:
        return lora_mlp(x, gate, **given, tile_rows=rows)

    trained = output().detach()
    with torch.no_grad(), kept_factors():
        assert torch.equal(output(), trained) and torch.equal(output(), trained)
    with torch.no_grad(), pytest.raises(ValueError, match="tile_rows is 0"):
        output(0)


def test_a_pair_is_converted_once_and_takes_two_bytes_a_number_in_16_bits() -> None:
    x, weights, loras = given(torch.bfloat16)
    with torch.no_grad(), kept_factors() as kept:
        lora_linear(x, weights, loras)
        ((_, (factors,)),) = kept.values()
        assert factors is not None
        held = [factors.a, *(b for b in factors.b if b is not None)]
        numbers = sum(one.numel() for lora in loras if lora is not None for one in (lora.a, lora.b))
        assert sum(one.untyped_storage().nbytes() for one in held) == 2 * numbers
        before = [one.data_ptr() for one in held]
        lora_linear(x, weights, loras)
        assert [one.data_ptr() for one in held] == before and held_factors([loras], torch.bfloat16)[0] is factors
        assert held_factors([loras], torch.float32)[0] is not factors, "another dtype is another copy"
    assert not kept and KEPT.get() is None


def test_layers_without_lora_on_one_input_and_on_two_are_kept_apart() -> None:
    with kept_factors():
        assert held_factors([[None, None, None]], torch.float32) == [None]
        assert held_factors([[None], [None]], torch.float32) == [None, None]


def test_after_sampling_changed_adapters_are_read_anew_and_training_inside_reads_them_as_they_are() -> None:
    x, weights, loras = given(torch.bfloat16)
    with torch.no_grad(), kept_factors():
        before = lora_linear(x, weights, loras)
        with torch.enable_grad():
            lora_linear(x, weights, loras)[0].sum().backward()
    assert loras[0] is not None and loras[0].a.grad is not None
    with torch.no_grad():
        loras[0].b.mul_(2)
        with kept_factors():
            after = lora_linear(x, weights, loras)
    assert not torch.equal(before[0], after[0]) and torch.equal(before[2], after[2])


def test_another_thread_does_not_read_what_is_kept_here() -> None:
    seen: list[object] = []
    with kept_factors():
        thread = threading.Thread(target=lambda: seen.append(KEPT.get()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_pairs_of_other_layers_and_other_scales_have_factors_of_their_own() -> None:
    x, weights, loras = given(torch.float32)
    with torch.no_grad(), kept_factors() as kept:
        both = lora_linear(x, weights, loras)
        turned = lora_linear(x, weights, [loras[2], None, loras[0]])
        first = loras[0]
        assert first is not None
        doubled = lora_linear(x, weights, [LoRA(first.a, first.b, 1.4), None, None])
        assert len(kept) == 3
    assert not torch.equal(both[0], turned[0]) and not torch.equal(both[0], doubled[0])


# With weights that sampling holds dequantized


@pytest.mark.parametrize("rows", [3, ONE_PRODUCT + 1])
def test_one_product_yields_the_base_and_a_and_one_launch_adds_all_b(rows: int) -> None:
    weight = NF4Weight.adjacent([quantized(64, 64, torch.float32) for _ in range(3)])
    loras, generator = [pair(64, 64, 2), None, pair(64, 64, 3)], torch.Generator().manual_seed(5)
    x, bias = torch.randn(rows, 64, generator=generator), torch.randn(64, generator=generator)
    wide = WideWeights(2)
    token = WIDE.set(wide)
    try:
        with torch.no_grad(), kept_factors() as kept:
            for _ in range(2):  # the second time with another adapter at the same place
                wide.take_adapters()
                with CountedOps() as counted:
                    found = lora_linear(x, [weight], loras, [bias, None, None])
                exact = [one.double() for one in lora_linear_exact(x, weight, loras, bias)]
                torch.testing.assert_close([one.double() for one in found], exact, rtol=0, atol=2e-4)
                for lora in loras:
                    if lora is not None:
                        lora.a.mul_(-2)
                convert_again(kept)
            launches = ["aten::addmm", "lowmem_grpo::lora_up"]
            assert rows > ONE_PRODUCT or [name for name in counted.names if name in (*launches, "aten::mm", "aten::cat")
                                          ] == launches
            assert all(one.is_contiguous() for one in found)
    finally:
        WIDE.reset(token)


def lora_linear_exact(x: Tensor, weight: NF4Weight, loras: list[LoRA | None], bias: Tensor) -> list[Tensor]:
    outputs = list((x.double() @ nf4_dequantize(weight).double().T).split(64, 1))
    outputs[0] = outputs[0] + bias.double()
    return [y if lora is None else y + lora.scale * (x.double() @ lora.a.double().T) @ lora.b.double().T
            for y, lora in zip(outputs, loras, strict=True)]


# In training


class Casts(TorchDispatchMode):
    """Counts the launches that convert adapters."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name == "aten::_foreach_copy_"
        return func(*args, **(kwargs or {}))


def trained(x: Tensor, weights: list[Tensor], loras: list[LoRA | None]) -> list[Tensor]:
    """The output of two checkpointed nodes on three layers and all gradients, which this call also clears."""
    tensors = [tensor for lora in loras if lora is not None for tensor in (lora.a, lora.b)]
    x = x.clone().requires_grad_()

    def outputs(x: Tensor) -> Tensor:
        q, _, v = lora_linear(x, weights, loras)
        return q.sum() + lora_mlp(x, *weights[:2], weights[2].T, gate_lora=loras[0], up_lora=loras[2]).sum() + v.sum()

    y = checkpoint(outputs, x, use_reentrant=False)
    return [y.detach(), *torch.autograd.grad(y, [x, *tensors])]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_training_each_pair_is_converted_once_an_optimizer_step_with_the_same_bits(dtype: torch.dtype) -> None:
    x, weights, loras = given(dtype)
    shared, expected = SharedFactors(), trained(x, weights, loras)
    counts = []
    for _ in range(2):  # steps
        with Casts() as casts, shared.unchanged():
            assert same(trained(x, weights, loras), expected) and same(trained(x, weights, loras), expected)
        counts.append(casts.count)
    assert counts == ([2, 1] if dtype == torch.bfloat16 else [0, 0]), "two nodes, then both in one launch on entry"
    assert not any(factors for *_, factors in shared.held.values()), "nothing is held outside"


def in_place(tensor: Tensor) -> None:
    tensor.mul_(2)


def unseen_by_autograd(tensor: Tensor) -> None:
    tensor.data.mul_(2)  # as bitsandbytes' kernels write


def other_memory(tensor: Tensor) -> None:
    tensor.data = tensor.data * 2  # as the reference adapter takes the place of the trained one


@every_row("change", [in_place, unseen_by_autograd, other_memory])
@every_row("inside", [False, True])
def test_in_training_a_changed_adapter_is_never_read_as_it_was(change: Callable[[Tensor], None], inside: bool) -> None:
    x, weights, loras = given(torch.bfloat16)
    shared, first = SharedFactors(), loras[0]
    assert first is not None
    if inside and change is unseen_by_autograd:
        return  # an optimizer, which does not step inside
    with torch.no_grad(), shared.unchanged():
        before = lora_linear(x, weights, loras)
        if inside:
            change(first.b)
            found = lora_linear(x, weights, loras)
    if not inside:
        with torch.no_grad():
            change(first.b)
        with torch.no_grad(), shared.unchanged():
            found = lora_linear(x, weights, loras)
    with torch.no_grad():
        assert same(list(found), list(lora_linear(x, weights, loras))) and not torch.equal(found[0], before[0])


def test_in_training_a_thread_of_autograd_shares_what_was_converted() -> None:
    _, _, loras = given(torch.bfloat16)
    found: list[object] = []
    with torch.no_grad(), SharedFactors().unchanged():
        thread = threading.Thread(target=lambda: found.extend(shared_factors([loras], torch.bfloat16)))
        thread.start()
        thread.join()
        assert found == shared_factors([loras], torch.bfloat16)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_fake_adapters_which_all_have_one_address_do_not_get_each_others_shapes() -> None:
    with FakeTensorMode(), torch.no_grad(), SharedFactors().unchanged():
        for size in (IN, OUT):
            x, a, b = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((3, size), (RANK, size), (INNER, RANK)))
            weight, lora = torch.empty(INNER, size, dtype=torch.bfloat16), LoRA(a.float(), b.float())
            assert lora_linear(x, [weight], [lora])[0].shape == (3, INNER)
