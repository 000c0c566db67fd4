"""Which adapter an engine samples with, and the slots that hold its numbers."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from small_models import SPLIT, load_model, scatter
from torch import Tensor
from vllm_models import (
    GATE_UP,
    OUT,
    QKV,
    addresses,
    borrow,
    close_to,
    inputs,
    linear_of,
    move_adapter,
    reallocated,
    sampled,
    theirs,
)

from lowmem_grpo.engines.vllm.shared_linear import BorrowError
from lowmem_grpo.models.policy import Policy

pytestmark = pytest.mark.usefixtures("no_layers_left")


def second_adapter(model: Any, r: int = 4, alpha: int = 8, targets: Any = SPLIT, **options: Any) -> None:
    """Another adapter beside the first, and active."""
    model.add_adapter("saved", peft.LoraConfig(r=r, lora_alpha=alpha, target_modules=targets, **options))
    scatter(model, 0.1, seed=9, of=".saved.")
    model.set_adapter("saved")


def values(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("options", "target"), [
    ({}, QKV), ({"r": 2}, QKV), ({"alpha": 4}, OUT), ({"targets": ["q_proj", "up_proj"]}, QKV),
    ({"targets": ["q_proj", "up_proj"]}, OUT), ({"targets": ["q_proj", "up_proj"]}, GATE_UP),
])
def test_another_adapter_is_sampled_with_by_its_values_and_leaves_no_trace(
    tiny: peft.PeftModel, options: dict[str, Any], target: str
) -> None:
    loan = borrow(tiny)
    x = inputs(tiny, target)
    first = sampled(loan, target, x)
    second_adapter(tiny, **options)
    before, expected = values(tiny), theirs(tiny, target, x)
    places = addresses(target)
    close_to(sampled(loan, target, x), expected)
    assert addresses(target) == places
    assert all(torch.equal(value, before[name]) for name, value in values(tiny).items())
    tiny.set_adapter("default")
    assert torch.equal(sampled(loan, target, x), first)


def several_active(model: Any) -> None:
    second_adapter(model)
    model.base_model.set_adapter(["default", "saved"])


@pytest.mark.parametrize(("act", "message"), [
    (lambda model: second_adapter(model, r=8),
     "'saved' has rank 8, the one that this engine started with has rank 4"),
    (lambda model: second_adapter(model, use_dora=True), "variant of LoRA"),
    (lambda model: second_adapter(model, lora_bias=True, targets=["q_proj"]), "variant of LoRA"),
    (several_active, r"\['default', 'saved'\] are active at once"),
    (lambda model: linear_of(model).enable_adapters(False), r"turned off in some layers \(.*k_proj\)"),
], ids=["rank", "dora", "bias", "several", "turned off in some layers"])
def test_an_adapter_that_cannot_be_sampled_with_is_refused_by_name_and_changes_nothing(
    tiny: peft.PeftModel, act: Callable[[Any], None], message: str
) -> None:
    loan = borrow(tiny)
    act(tiny)
    before = values(tiny)
    with pytest.raises(BorrowError, match=message):
        loan.use_policy(False)
    assert all(torch.equal(value, before[name]) for name, value in values(tiny).items())


def test_an_adapter_on_a_layer_that_has_none_is_refused_by_name() -> None:
    model = peft.get_peft_model(load_model("tiny"), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model.add_adapter("saved", peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))
    loan = borrow(model)
    model.set_adapter("saved")
    with pytest.raises(BorrowError, match=r"o_proj: .*'saved' has rank 4, .*has no LoRA there"):
        loan.use_policy(False)


def test_an_adapter_that_peft_turned_off_is_off_and_on_again(tiny: peft.PeftModel) -> None:
    loan = borrow(tiny)
    x = inputs(tiny, QKV)
    on = sampled(loan, QKV, x)
    with tiny.disable_adapter():
        expected = theirs(tiny, QKV, x)
        close_to(sampled(loan, QKV, x), expected)
    assert (on - expected).abs().max() > 0.01
    assert torch.equal(sampled(loan, QKV, x), on)
    close_to(sampled(loan, QKV, x, base_model=True), expected)


@pytest.mark.parametrize(("config", "message"), [
    (peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), "another kind than L"),
    (peft.LoraConfig(target_modules=["q_proj"], use_dora=True), "q_proj: .*variant of LoRA"),
    (peft.LoraConfig(target_modules=["q_proj"], lora_bias=True), "q_proj: .*variant of LoRA"),
    (peft.LoraConfig(target_modules=["embed_tokens"]), "not the trainer's plain embedding"),
])
def test_an_adapter_that_is_not_plain_lora_is_refused_at_start(config: Any, message: str) -> None:
    with pytest.raises(BorrowError, match=message):
        borrow(peft.get_peft_model(load_model("tiny"), config))


def test_factors_that_do_not_fit_their_layer_are_refused_with_their_shapes(tiny: peft.PeftModel) -> None:
    linear_of(tiny, OUT).lora_A["default"].weight.data = torch.zeros(4, 7)
    with pytest.raises(BorrowError, match=r"o_proj: adapter 'default' has factors \(4, 7\) and .* needs \(rank, "):
        borrow(tiny)


def test_a_live_adapter_may_move_while_a_copy_is_sampled_with(tiny: peft.PeftModel) -> None:
    loan = borrow(tiny)
    reallocated(linear_of(tiny).lora_A["default"].weight)
    reallocated(linear_of(tiny).lora_B["default"].weight)
    loan.check()
    move_adapter(Policy(tiny), 0.5, seed=4)
    x = inputs(tiny, QKV)
    close_to(sampled(loan, QKV, x), theirs(tiny, QKV, x))
