"""Attention by groups of heads: as accurate as all at once, however many groups, and a peak that does not grow."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from accuracy import assert_as_accurate
from memory import LiveStorage
from packed_problem import GROUPS, Learned, batch_of, learned, outcome
from small_models import load_model, with_adapter
from tables import pairwise
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.memory import cutting
from lowmem_grpo.memory.offload.activations import ActivationOffload
from lowmem_grpo.memory.offload.pages import Copies
from lowmem_grpo.models.head_groups import by_head_groups, without_waiting
from lowmem_grpo.models.packed_attention import Causal, PackedLayout, packed_attention
from lowmem_grpo.models.policy import Policy

# of the largest value: attention over fewer heads at once may add up in another order
EPSILON = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
NEAR = 1e-5  # the same behind the layers of a model in float32
HEADS = {"each its own keys": (4, 4), "shared keys": (8, 2), "odd": (9, 3), "fifteen": (15, 5), "one key head": (3, 1)}


def made(heads: int, key_heads: int, tokens: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Query, key and value (1, H, T, K) as a layer has them, and a gradient (1, T, H, K)."""
    generator = torch.Generator().manual_seed(1)
    found = [torch.randn(1, tokens, count, 16, generator=generator, dtype=dtype)
             for count in (heads, key_heads, key_heads, heads)]
    return [one.transpose(1, 2).detach().requires_grad_() for one in found[:3]], found[3]


@pytest.mark.parametrize(*pairwise(
    kind=HEADS, name=("one group", "two groups", "alone among others"), groups=(2, 3, 64), dtype=EPSILON,
    once=(False, True), window=(None, 5),
))
def test_groups_of_heads_are_as_accurate_as_all_heads_together(
    kind: str, name: str, groups: int, dtype: torch.dtype, once: bool, window: int | None
) -> None:
    batch = batch_of(GROUPS[name])
    tensors, grad = made(*HEADS[kind], len(batch.input_ids), dtype)

    def run(groups: int, heads: list[Tensor]) -> dict[str, Tensor]:
        layout = replace(PackedLayout.from_batch(batch, groups), once=once)
        return outcome(lambda q, k, v: packed_attention(q, k, v, layout, 0.3, 0.0, window), heads, grad)

    together, apart = run(1, tensors), run(groups, tensors)
    for what, exact in run(1, [one.detach().double().requires_grad_() for one in tensors]).items():
        assert_as_accurate(what, apart[what], together[what], exact, EPSILON[dtype])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["tiny", "Qwen3", "Gemma3"])
@pytest.mark.every(2)
def test_a_model_learns_the_same_with_prompts_side_by_side_and_computed_once(
    family: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(with_adapter(load_model(family)))
    if checkpointing:
        policy.model.enable_input_require_grads()
        policy.model.gradient_checkpointing_enable()
        policy.model.train()
    batch = batch_of([(23, [3, 2, 9]), (6, [10, 7]), (4, [5])])
    exact = learned(Policy(copy.deepcopy(policy.model).double()), batch)
    for pairs in (cutting.PAIRS_A_CALL, -(10**9)):
        monkeypatch.setattr(cutting, "PAIRS_A_CALL", pairs)
        policy.head_groups = 1
        together = learned(policy, batch)
        policy.head_groups = 4
        assert_as_exact(learned(policy, batch), together, exact, NEAR)


def assert_as_exact(found: Learned, together: Learned, exact: Learned, epsilon: float) -> None:
    """Log-probabilities and gradients of groups of heads, by what those of all heads together are off."""
    every = zip(*((one[0], *one[1].values()) for one in (found, together, exact)), strict=True)
    for number, (ours, reference, truth) in enumerate(every):
        assert_as_accurate(f"tensor {number}", ours, reference, truth, epsilon)


def test_mixed_precision_and_a_backward_pass_inside_the_offload_lose_no_accuracy() -> None:
    model = with_adapter(load_model("tiny"))
    policy, batch = Policy(model, torch.bfloat16), batch_of(GROUPS["two groups"])
    together = learned(policy, batch)
    policy.head_groups = 2
    with ActivationOffload(policy.model, Copies(), min_bytes=1) as offload:
        found = learned(policy, batch)
        assert offload.host_bytes_peak > 0
    exact = learned(Policy(copy.deepcopy(model).double()), batch)
    assert_as_exact(found, together, exact, EPSILON[torch.bfloat16])


def test_with_dropout_the_heads_stay_together_since_random_numbers_would_differ() -> None:
    (query, key, value), _ = made(4, 2, 6, torch.float32)
    causal = Causal(None, 0.5, None, 6, {}, 2)
    torch.manual_seed(0)
    found = causal(query, key, value)
    torch.manual_seed(0)
    assert torch.equal(found, causal.attend(query, key, value))
    with torch.no_grad():  # nothing to keep for backward
        assert Causal(None, 0.0, None, 6, {}, 2)(query, key, value).grad_fn is None


def test_what_is_computed_again_before_attention_ends_there_and_attention_runs_as_often_as_without() -> None:
    (query, key, value), grad = made(4, 2, 6, torch.float32)
    causal, calls = Causal(None, 0.0, None, 6, {}), []

    def attend(*heads: Any) -> Tensor:
        calls.append("attention")
        return causal.of_heads(*heads)

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append("before")
        return by_head_groups(q * 2, k * 2, v * 2, attend, 2)

    expected = compute(query, key, value)
    plain = torch.autograd.grad(expected, (query, key, value), grad.transpose(1, 2))
    assert calls == ["before", *["attention"] * 4]
    calls.clear()
    found = without_waiting(torch.nn.Identity(), compute, query, key, value)
    again = torch.autograd.grad(found, (query, key, value), grad.transpose(1, 2))
    assert calls == ["before", *["attention"] * 2, "before", *["attention"] * 2]
    assert torch.equal(found, expected) and all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))


def test_keys_that_take_no_gradient_get_none() -> None:
    (query, key, value), grad = made(4, 2, 6, torch.float32)
    key = key.detach()
    result = by_head_groups(query, key, value, Causal(None, 0.0, None, 6, {}).of_heads, 2)
    result.backward(grad.transpose(1, 2))
    assert query.grad is not None and value.grad is not None and key.grad is None


def peak_of(groups: int, tokens: int, heads: int, key_heads: int) -> int:
    """Bytes that the backward pass of one layer's attention holds at most, beside q, k, v and the gradient given."""
    with FakeTensorMode():
        tensors = [torch.empty(1, tokens, count, 128, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
                   for count in (heads, key_heads, key_heads)]
        causal = Causal(None, 0.0, None, tokens, {}, groups)
        result, grad = causal(*tensors), torch.empty(1, heads, tokens, 128, dtype=torch.bfloat16)
        with LiveStorage() as live:
            torch.autograd.grad(result, tensors, grad)
        return live.peak


def test_at_8b_and_131072_tokens_backward_holds_its_gradients_and_one_group() -> None:
    """dq, dk and dv are 1.5 GiB; a group of 8 has 0.125 GiB of queries, and its result, gradients and log-sums."""
    gradients = 2 * 131072 * 128 * (32 + 2 * 8)
    group = gradients // 8
    found = peak_of(8, 131072, 32, 8)
    assert gradients < found <= gradients + 2.5 * group
    assert peak_of(8, 131072, 64, 8) - 2 * 131072 * 128 * (64 + 16) < 2 * 2.5 * group  # grows with a group's heads only
    assert peak_of(16, 131072, 64, 16) - 2 * 131072 * 128 * (64 + 32) <= 2.5 * group  # and not with their number


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_lora_drops_out_is_the_same_where_queries_are_computed_again(checkpointing: bool) -> None:
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(bare, r=4, lora_dropout=0.2, use_gradient_checkpointing=checkpointing)
    policy, batch = Policy(model.train()), batch_of(GROUPS["two groups"])
    found = []
    for policy.head_groups in (1, 4):
        torch.manual_seed(3)
        found.append(learned(policy, batch))
    for one, other in zip(*((logprobs, *grads.values()) for logprobs, grads in found), strict=True):
        assert (one - other).abs().max() <= NEAR * one.abs().max()  # other numbers drawn would be off by a tenth
