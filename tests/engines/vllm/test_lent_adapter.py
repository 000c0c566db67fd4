"""Which adapter an engine samples with, and the slots that hold its numbers."""

from typing import Any

import peft
import pytest
import torch
from card import CPU
from small_models import SPLIT, load_model, scatter
from torch import Tensor
from vllm_models import (
    GATE_UP,
    OUT,
    QKV,
    addresses,
    borrow,
    close_to,
    fuse,
    inputs,
    linear_of,
    move_adapter,
    ours,
    reallocated,
    sampled,
    theirs,
)

from lowmem_grpo.engines.vllm.lent_adapter import AdapterCopy
from lowmem_grpo.engines.vllm.lent_layers import LAYERS, BorrowError
from lowmem_grpo.engines.vllm.loan import loras_of
from lowmem_grpo.models.policy import Policy

pytestmark = pytest.mark.usefixtures("no_layers_left")


def second_adapter(model: Any, r: int = 4, alpha: int = 8, targets: Any = SPLIT, **options: Any) -> None:
    """Another adapter beside the first, and active."""
    model.add_adapter("saved", peft.LoraConfig(r=r, lora_alpha=alpha, target_modules=targets, **options))
    scatter(model, 0.1, seed=9, of=".saved.")
    model.set_adapter("saved")


def values(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("options", "target", "copied"), [
    ({}, QKV, True), ({"r": 2}, QKV, False), ({"alpha": 4}, OUT, False),
    ({"targets": ["q_proj", "up_proj"]}, QKV, True), ({"targets": ["q_proj", "up_proj"]}, OUT, False),
    ({"targets": ["q_proj", "up_proj"]}, GATE_UP, False),
])
def test_another_adapter_is_sampled_with_by_its_values_and_leaves_no_trace(
    tiny: peft.PeftModel, options: dict[str, Any], target: str, copied: bool
) -> None:
    slots = AdapterCopy(loras_of(tiny.get_base_model(), "default"), torch.float32, CPU, True) if copied else None
    loan = borrow(tiny, copied=slots)
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


@pytest.mark.parametrize(("options", "message"), [
    ({"r": 8}, "'saved' has rank 8, the one that this engine started with has rank 4"),
    ({"use_dora": True}, "variant of LoRA"), ({"lora_bias": True, "targets": ["q_proj"]}, "variant of LoRA"),
])
def test_an_adapter_that_does_not_fit_is_refused_by_name_and_changes_nothing(
    tiny: peft.PeftModel, options: dict[str, Any], message: str
) -> None:
    loan = borrow(tiny)
    second_adapter(tiny, **options)
    before = values(tiny)
    with pytest.raises(BorrowError, match=message):
        loan.take(False)
    assert all(torch.equal(value, before[name]) for name, value in values(tiny).items())


def test_an_adapter_on_a_layer_that_has_none_is_refused_by_name() -> None:
    model = peft.get_peft_model(load_model("tiny"), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model.add_adapter("saved", peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))
    loan = borrow(model)
    model.set_adapter("saved")
    with pytest.raises(BorrowError, match=r"o_proj: .*'saved' has rank 4, .*has no LoRA there"):
        loan.take(False)


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


def test_several_active_adapters_are_refused_by_name(tiny: peft.PeftModel) -> None:
    loan = borrow(tiny)
    second_adapter(tiny)
    tiny.base_model.set_adapter(["default", "saved"])
    with pytest.raises(BorrowError, match=r"\['default', 'saved'\] are active at once"):
        loan.take(False)
    with pytest.raises(BorrowError, match="are active at once"):
        borrow(tiny)


def test_an_adapter_turned_off_in_some_layers_is_refused_with_one_of_them(tiny: peft.PeftModel) -> None:
    loan = borrow(tiny)
    linear_of(tiny).enable_adapters(False)
    with pytest.raises(BorrowError, match=r"turned off in some layers \(.*k_proj\)"):
        loan.take(False)


def test_what_identifies_the_sampled_adapter_changes_with_it(tiny: peft.PeftModel) -> None:
    loan, seen = borrow(tiny), []

    def identity(base_model: bool = False) -> Any:
        return loan.take(base_model)

    assert identity() == identity()
    assert identity(base_model=True) == identity(base_model=True) != identity()
    seen.append(identity())
    move_adapter(Policy(tiny), 0.1)
    assert identity() not in seen
    second_adapter(tiny)
    assert identity() != identity()  # what a saved adapter holds may change with no sign of it


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


@pytest.fixture
def slots(tiny: peft.PeftModel) -> AdapterCopy:
    return AdapterCopy(loras_of(tiny.get_base_model(), "default"), torch.float32, CPU, published=True)


def test_a_rollout_copy_changes_when_published_and_not_before(tiny: peft.PeftModel, slots: AdapterCopy) -> None:
    loan = borrow(tiny, copied=slots)
    x = inputs(tiny, QKV)
    first = theirs(tiny, QKV, x)
    move_adapter(Policy(tiny), 0.5, seed=4)
    close_to(sampled(loan, QKV, x), first)
    loan.publish(7)
    second = theirs(tiny, QKV, x)
    close_to(ours(QKV, x), first)  # a call under way goes on with what it began with
    move_adapter(Policy(tiny), 0.5, seed=5)
    close_to(sampled(loan, QKV, x), second)
    assert slots.version == 7
    assert (first - second).abs().max() > 0.1


def test_the_slots_of_a_rollout_copy_never_move_and_are_adjacent(tiny: peft.PeftModel, slots: AdapterCopy) -> None:
    fuse(tiny, QKV)
    loan = borrow(tiny, copied=slots)
    (product,) = LAYERS[QKV].products
    assert product.stack_a is not None
    assert product.stack_b is not None
    places = [room.data_ptr() for room in slots.rooms], product.stack_a.data_ptr()
    for version in range(3):
        move_adapter(Policy(tiny), 0.5, seed=version)
        loan.publish(version)
        x = inputs(tiny, QKV)
        close_to(sampled(loan, QKV, x), theirs(tiny, QKV, x))
    assert places == ([room.data_ptr() for room in slots.rooms], product.stack_a.data_ptr())


def test_a_rollout_copy_outlives_the_engine_that_samples_with_it(tiny: peft.PeftModel, slots: AdapterCopy) -> None:
    loan = borrow(tiny, copied=slots)
    x = inputs(tiny, QKV)
    first = sampled(loan, QKV, x)
    loan.close()
    move_adapter(Policy(tiny), 0.5, seed=4)
    close_to(sampled(borrow(tiny, copied=slots), QKV, x), first)


@pytest.mark.parametrize("published", [False, True])
def test_a_live_adapter_may_move_while_a_copy_is_sampled_with(
    tiny: peft.PeftModel, slots: AdapterCopy, published: bool
) -> None:
    loan = borrow(tiny, copied=slots if published else None)
    reallocated(linear_of(tiny).lora_A["default"].weight)
    reallocated(linear_of(tiny).lora_B["default"].weight)
    loan.check()
    move_adapter(Policy(tiny), 0.5, seed=4)
    loan.publish(1)
    x = inputs(tiny, QKV)
    close_to(sampled(loan, QKV, x), theirs(tiny, QKV, x))


def test_publishing_an_adapter_of_another_shape_is_refused(tiny: peft.PeftModel, slots: AdapterCopy) -> None:
    loan = borrow(tiny, copied=slots)
    tiny.delete_adapter("default")
    with pytest.raises(BorrowError, match="shape or scale of adapter 'default' changed"):
        loan.publish(1)
