"""Adapters while sampling: converted once, adjacent, with the same results bit for bit, and never out of date."""

import threading

import pytest
import torch
from tables import every_row
from torch import Tensor

from lowmem_grpo.kernels.lora import lora_linear
from lowmem_grpo.kernels.lora_factors import KEPT, LoRA, held_factors, kept_factors
from lowmem_grpo.kernels.lora_mlp import lora_mlp

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
