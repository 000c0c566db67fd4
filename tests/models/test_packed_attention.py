"""Attention of packed sequences, side by side and with prompts computed once, windows or not, against float64."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from card import DEVICES
from memory import LiveStorage
from packed_problem import GROUPS, batch_of, learned, outcome
from small_models import random_model, with_adapter
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import CausalBias
from torch.utils.flop_counter import FlopCounterMode

from lowmem_grpo.memory import cutting
from lowmem_grpo.models import packed_attention
from lowmem_grpo.models.packed_attention import Causal, PackedLayout
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import MicroBatch

EPSILON = {torch.float32: 1e-6, torch.bfloat16: 2**-8}  # of the largest of all values: other orders, parts rounded

CASES = [  # the dtype acts on the products alone, not on where a window's blocks lie
    (None, 1024, torch.bfloat16), (5, 3, torch.bfloat16),
    *((window, block, torch.float32) for window, block in (
        (None, 1024), (1, 1024), (5, 1024), (5, 3), (3, 7), (16, 4), (100, 2))),
]

def heads_of(batch: MicroBatch, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Random query, key and value (1, H, T, K), as a model's layer has them, and a gradient of the result."""
    generator, count = torch.Generator().manual_seed(1), len(batch.input_ids)
    made = [torch.randn(1, count, heads, 16, generator=generator).to(device, dtype) for heads in (4, 2, 2, 4)]
    return [one.transpose(1, 2).detach().requires_grad_() for one in made[:3]], made[3]


def alone(query: Tensor, key: Tensor, value: Tensor, batch: MicroBatch, window: int | None) -> Tensor:
    """(1, T, H, K): scores of each sequence by itself, with all that it may not see masked."""
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    result = query.new_zeros(query.shape)
    lengths = batch.cu_seqlens.diff().tolist()
    for number, (row, length) in enumerate(zip(batch.sources.view(len(lengths), -1), lengths, strict=True)):
        tokens = row[:length]
        scores = query[:, :, tokens] @ key[:, :, tokens].mT / query.shape[-1] ** 0.5
        seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        if window is not None:
            seen &= ~seen.tril(-window)
        out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value[:, :, tokens]
        first = batch.places[tokens] // batch.max_seqlen == number
        result = result.index_copy(2, tokens[first], out[:, :, first])
    return result.transpose(1, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("window", "block", "dtype"), CASES)
@pytest.mark.every(2)
def test_results_and_gradients_are_those_of_each_sequence_alone(
    window: int | None, block: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "BLOCK", block)
    for name, once in product(GROUPS, (False, True)):
        assert_as_accurate_as_alone(name, once, window, dtype, device)


def assert_as_accurate_as_alone(
    name: str, once: bool, window: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    batch = batch_of(GROUPS[name]).to(device)
    layout = replace(PackedLayout.from_batch(batch), once=once)
    heads, grad = heads_of(batch, dtype, device)
    exact = [one.detach().double().requires_grad_() for one in heads]
    ours = outcome(lambda q, k, v: packed_attention.packed_attention(q, k, v, layout, None, 0.0, window), heads, grad)
    reference = outcome(lambda q, k, v: alone(q, k, v, batch, window), heads, grad)
    truth = outcome(lambda q, k, v: alone(q, k, v, batch, window), exact, grad)
    scale = max(values.abs().max() for values in truth.values())  # in a window of 1, queries and keys have no gradient
    for what, values in truth.items():
        assert ours[what].dtype == dtype and ours[what].shape == values.shape
        error, allowed = ((found[what].double() - values).abs().max() for found in (ours, reference))
        assert error <= allowed + EPSILON[dtype] * scale, what


def test_mixed_precision_computes_prompts_once_in_its_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "PAIRS_A_CALL", -(10**9))  # once whatever it costs
    batch = batch_of(GROUPS["two groups"])
    model = with_adapter(random_model("Qwen3"))
    exact, _ = learned(Policy(model), batch)
    mixed, _ = learned(Policy(model, torch.bfloat16), batch)
    assert (mixed - exact).abs().max() < 0.1 * exact.abs().max()
    assert not torch.equal(mixed, exact)


def test_short_prompts_stay_side_by_side_and_long_ones_are_computed_once() -> None:
    assert not cutting.prompts_once([(99, *[200] * 8)] * 8)  # GSM8K: 8 prompts of 8 completions
    assert not cutting.prompts_once([(511, *[512] * 8)])
    assert cutting.prompts_once([(2047, *[512] * 8)])
    assert cutting.prompts_once([(8191, *[512] * 8)])
    assert cutting.prompts_once([(0, 20_000), (0, 100)])  # nothing is shared, but half would be padding
    assert not cutting.prompts_once([(20_000, 480)])
    assert not cutting.prompts_once([(3, 5), (2, 4)])


def test_rows_that_attention_lays_side_by_side_are_counted() -> None:
    assert cutting.token_rows([(8191, 512)]) == 0
    assert cutting.token_rows([(99, *[200] * 8), (49, 100)]) == 9 * 299
    assert cutting.token_rows([(8191, *[512] * 8)]) == 8191 + 8 * 512 + 8 * (8191 + 512) // 2


def layers_heads(tokens: int) -> list[Tensor]:
    """Query, key and value of Llama-3.1-8B in bfloat16."""
    return [torch.empty(1, tokens, heads, 128, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
            for heads in (32, 8, 8)]


def flops_forward(query: Any, key: Any, *arguments: Any, out_shape: Any = None, **options: Any) -> int:
    """FLOPs of the CPU's fused attention, which torch's counter does not know: two products, masked pairs included."""
    rows, heads, queries, size = query
    return 4 * rows * heads * queries * key[2] * size


def flops_backward(grad: Any, query: Any, key: Any, *arguments: Any, out_shape: Any = None, **options: Any) -> int:
    """The scores again, and the products for four gradients."""
    return flops_forward(query, key) * 5 // 2


ATEN = torch.ops.aten
FLOPS = {ATEN._scaled_dot_product_flash_attention_for_cpu: flops_forward,
         ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flops_backward}


def fake_layout(mode: FakeTensorMode, batch: MicroBatch, once: bool) -> PackedLayout:
    fakes = {name: mode.from_tensor(value) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return replace(PackedLayout.from_batch(replace(batch, **fakes)), once=once)


def attention_flops(batch: MicroBatch, once: bool) -> tuple[int, int]:
    """Return the FLOPs of one layer's attention, forward and backward, and its peak bytes, on fake tensors."""
    with FakeTensorMode() as mode:
        layout, heads = fake_layout(mode, batch, once), layers_heads(len(batch.input_ids))
        with LiveStorage() as storage, FlopCounterMode(display=False, custom_mapping=FLOPS) as counter:
            result = packed_attention.packed_attention(*heads, layout, None, 0.0, None)
            torch.autograd.grad(result, heads, torch.empty_like(result))
    return counter.get_total_flops(), storage.peak


def test_a_long_prompt_shared_by_eight_takes_a_quarter_of_attentions_products_and_memory() -> None:
    batch = batch_of([(2048, [256] * 8)])
    once, side_by_side = (attention_flops(batch, choice) for choice in (True, False))
    assert 0 < once[0] <= side_by_side[0] / 4
    assert 0 < once[1] <= side_by_side[1] / 4


@pytest.mark.parametrize("once", [False, True])
def test_a_window_makes_no_mask_of_tokens_by_tokens(once: bool) -> None:
    batch = batch_of([(12_000, [4096, 4000])])
    window, width = 1024, batch.max_seqlen
    with FakeTensorMode() as mode:
        layout = fake_layout(mode, batch, once)
        heads = [torch.empty(1, len(batch.input_ids), 1, 16, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
                 for _ in range(3)]
        with LiveStorage() as storage:
            for _ in range(3):  # layers
                packed_attention.packed_attention(*heads, layout, None, 0.0, window).sum().backward()
    masks = sum(mask.untyped_storage().nbytes() for mask in layout.masks.values())
    assert masks == 2 * cutting.mask_numbers(window, width) == 2 * 1024 * (1024 + 1024)
    assert storage.largest < width * width / 16  # bytes: a boolean mask alone would take width * width


def test_the_mask_of_a_window_is_made_once_for_all_layers() -> None:
    batch, made = batch_of([(30, [12, 9])]), []
    layout = PackedLayout.from_batch(batch)
    heads, _ = heads_of(batch, torch.float32, torch.device("cpu"))
    for _ in range(3):
        packed_attention.packed_attention(*heads, layout, None, 0.0, 8)
        made.append({name: mask.data_ptr() for name, mask in layout.masks.items()})
    assert made[0] and made[0] == made[1] == made[2]


def test_overlapping_parts_add_their_gradients_in_float32() -> None:
    whole = torch.zeros(1, 1, 4, 2, dtype=torch.bfloat16, requires_grad=True)
    ranges = [(0, 4), *[(2, 4)] * 256]
    found = packed_attention.parts(whole, ranges)
    grads = [torch.full_like(one, 2**-8 if number else 1.0) for number, one in enumerate(found)]
    (sums,) = torch.autograd.grad(found, whole, grads)
    assert sums[0, 0, :, 0].tolist() == [1, 1, 2, 2]  # in bfloat16 1 + 2**-8 is 1
    (some,) = torch.autograd.grad(packed_attention.parts(whole, ranges)[1].sum(), whole)
    assert some[0, 0, :, 0].tolist() == [0, 0, 1, 1]


def test_on_a_card_the_last_tokens_of_a_sequence_need_no_mask_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCard:
        """The part of a query by which a mask is chosen."""

        device = torch.device("cuda")

    assert isinstance(packed_attention.lower_right(3, 8, OnCard()), CausalBias)  # type: ignore[arg-type]
    asked: list[Any] = []
    monkeypatch.setattr(packed_attention, "shares_key_heads", lambda device, dtype, masked, size: asked.append(masked))
    monkeypatch.setattr(packed_attention, "lower_right", lambda q, k, _: packed_attention.causal_lower_right(q, k))
    heads = [torch.randn(1, count, tokens, 16) for count, tokens in ((4, 3), (2, 8), (2, 8))]
    result = Causal(None, 0.0, None, 8, {})(*heads)
    assert asked == [False]  # torch's form for the card takes shared key heads
    monkeypatch.undo()
    torch.testing.assert_close(result, Causal(None, 0.0, None, 8, {})(*heads))
