"""Borrowed layers without an engine: the trainer's own outputs from its frozen weights and a copy of its adapter."""

import copy
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from lent_parts import GATE_UP, MODULES, OUT, PARTS, QKV, close_to, fuse, fuse_plain, inputs, ours, theirs
from small_models import SPLIT, load_model, with_adapter
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_models import move_adapter, policy_of

from lowmem_grpo.engines.vllm import lent_layers as borrowed
from lowmem_grpo.engines.vllm.lent_adapter import AdapterCopy
from lowmem_grpo.engines.vllm.lent_layers import LAYERS, BorrowedLinear, BorrowError, Product, borrowed_linear
from lowmem_grpo.engines.vllm.loan import Loan, loras_of
from lowmem_grpo.kernels.nf4 import NF4Weight
from lowmem_grpo.models.policy import Policy

CPU = torch.device("cpu")
KINDS = {"float32": (torch.float32, False), "bfloat16": (torch.bfloat16, False), "nf4": (torch.float32, True),
         "nf4 in bfloat16": (torch.bfloat16, True)}


@pytest.fixture(autouse=True)
def no_layers_left() -> Iterator[None]:
    yield
    LAYERS.clear()


@pytest.fixture(params=KINDS)
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Policy:
    """The embedded model, whose q, k and v have biases, with an adapter that does something; of each weight type."""
    policy = policy_of("tiny", *KINDS[request.param], tmp_path)
    move_adapter(policy, 0.05)
    return policy


@pytest.fixture
def tiny() -> peft.PeftModel:
    """The embedded model in float32, its own for each test."""
    return with_adapter(load_model("tiny")).eval()


def borrow(model: Any, adapter: str | None = None, copied: AdapterCopy | None = None) -> Loan:
    """What an engine would borrow of the first layer."""
    borrowing = Loan(model.get_base_model(), CPU, adapter, copied)
    for name in MODULES:
        borrowing.linear(name, PARTS)
    borrowing.embedding("model.embed_tokens", head=False)
    borrowing.embedding("lm_head", head=True)
    norm = model.get_base_model().model.norm.weight
    borrowing.parameter("model.norm.weight", norm)
    return borrowing


def sampled(borrowing: Loan, layer: str, x: Tensor, base_model: bool = False) -> Tensor:
    """What the next call of an engine computes with."""
    borrowing.take(base_model)
    return ours(layer, x)


@pytest.mark.parametrize("layer", MODULES)
def test_a_borrowed_layer_gives_the_trainers_outputs(policy: Policy, layer: str) -> None:
    borrow(policy.model)
    for x in (inputs(policy.model, layer), inputs(policy.model, layer, 1), inputs(policy.model, layer, 6)[None]):
        got = ours(layer, x)
        assert got.dtype == x.dtype
        assert got.shape == (*x.shape[:-1], LAYERS[layer].out_features)
        close_to(got, theirs(policy.model, layer, x))


@pytest.mark.parametrize("layer", MODULES)
def test_an_adapter_changed_in_place_is_seen_by_the_next_call(policy: Policy, layer: str) -> None:
    borrowing = borrow(policy.model)
    x = inputs(policy.model, layer)
    before = sampled(borrowing, layer, x)
    move_adapter(policy, 0.5, seed=3)
    assert torch.equal(ours(layer, x), before)  # a call that is under way goes on with what it began with
    assert (sampled(borrowing, layer, x) - before).abs().max() > 0.1
    close_to(ours(layer, x), theirs(policy.model, layer, x))


def test_an_adapter_written_through_its_address_is_seen_by_the_next_call(tiny: peft.PeftModel) -> None:
    borrowing = borrow(tiny)
    x = inputs(tiny, QKV)
    before = sampled(borrowing, QKV, x)
    weight = linear_of(tiny).lora_B["default"].weight
    values = torch.full_like(weight, 0.5)
    ctypes.memmove(weight.data_ptr(), values.data_ptr(), values.nbytes)  # as bitsandbytes' optimizers do: no counter
    assert (sampled(borrowing, QKV, x) - before).abs().max() > 0.1
    close_to(ours(QKV, x), theirs(tiny, QKV, x))


@pytest.mark.parametrize("layer", MODULES)
def test_zeros_in_the_same_places_give_the_base_model(policy: Policy, layer: str) -> None:
    borrowing = borrow(policy.model)
    x = inputs(policy.model, layer)
    places = addresses(layer)
    before = sampled(borrowing, layer, x)
    with policy.base_model():
        close_to(sampled(borrowing, layer, x, base_model=True), theirs(policy.model, layer, x))
    assert torch.equal(sampled(borrowing, layer, x), before)
    assert addresses(layer) == places


def addresses(layer: str) -> list[int]:
    """Where the adapter lies that a layer is sampled with."""
    return [tensor.data_ptr() for lora in LAYERS[layer].loras if lora for tensor in (lora.a, lora.b)]


def test_a_layer_casts_or_joins_nothing_when_it_is_called(policy: Policy) -> None:
    borrow(policy.model)
    for layer in MODULES:
        x = inputs(policy.model, layer)
        with Ops() as ops:
            LAYERS[layer].products[0].forward(x)
        assert not ops.names & {"aten::cat", "aten::_to_copy", "aten::zeros", "aten::new_zeros"}, layer


class Ops(TorchDispatchMode):
    """The names of the operations on tensors; what a 4-bit weight takes on the CPU is one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", [False, True])
def test_the_copy_has_the_engines_dtype_and_2_bytes_a_number_of_a_16_bit_model(fused: bool, tmp_path: Path) -> None:
    model = policy_of("Llama", torch.bfloat16, True, tmp_path, hidden_size=256, num_key_value_heads=4).model
    if fused:
        fuse(model, QKV)
    (room,) = borrow(model).copy.rooms
    numbers = sum(lora.a.numel() + lora.b.numel() for lora in loras_of(model.get_base_model(), "default"))
    assert room.dtype == torch.bfloat16
    assert room.nbytes == 2 * numbers
    for product in LAYERS[QKV].products:
        assert product.one_kernel
        assert {part.untyped_storage().data_ptr() for part in (product.stack_a, product.stack_b)} == {
            room.untyped_storage().data_ptr()}


def test_layers_with_different_ranks_scales_and_without_lora_are_right() -> None:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"],
                             rank_pattern={"v_proj": 2}, alpha_pattern={"v_proj": 3})
    model = peft.get_peft_model(load_model("tiny"), config).eval()
    move_adapter(Policy(model), 0.3)
    borrowing = borrow(model)
    for layer in MODULES:
        x = inputs(model, layer)
        close_to(ours(layer, x), theirs(model, layer, x))
    move_adapter(Policy(model), 0.3, seed=8)
    for layer in MODULES:
        close_to(sampled(borrowing, layer, inputs(model, layer)), theirs(model, layer, inputs(model, layer)))


def test_4_bit_layers_with_different_ranks_and_without_lora_are_right(tmp_path: Path) -> None:
    whole = policy_of("Llama", torch.float32, True, tmp_path, hidden_size=256, num_key_value_heads=4).model
    fuse(whole, QKV)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"],
                             rank_pattern={"v_proj": 2}, alpha_pattern={"v_proj": 3})
    model = peft.get_peft_model(whole.unload(), config).eval()
    move_adapter(Policy(model), 0.3)
    borrow(model)
    assert len(LAYERS[QKV].products) == 1
    for layer in MODULES:
        x = inputs(model, layer)
        close_to(ours(layer, x), theirs(model, layer, x))


def test_dropout_does_not_act_while_sampling() -> None:
    model = with_adapter(load_model("tiny"), lora_dropout=0.5)
    borrow(model)
    x = inputs(model, QKV)
    expected = theirs(model.eval(), QKV, x)
    model.train()
    close_to(ours(QKV, x), expected)


# one product where weights are adjacent


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [QKV, GATE_UP])
def test_adjacent_weights_take_one_product_with_the_same_result(kind: str, layer: str, tmp_path: Path) -> None:
    # blocks of double quantization are 16,384 elements: the widths here make each weight end with one
    policy = policy_of("Llama", *KINDS[kind], tmp_path, hidden_size=256, num_key_value_heads=4, intermediate_size=256)
    move_adapter(policy, 0.05)
    x = inputs(policy.model, layer)
    borrow(policy.model)
    apart, count = ours(layer, x), len(LAYERS[layer].products)
    fuse(policy.model, layer)
    borrow(policy.model)
    (product,) = LAYERS[layer].products
    assert count == len(MODULES[layer])
    close_to(ours(layer, x), apart)
    close_to(ours(layer, x), theirs(policy.model, layer, x))
    assert storages(product) <= {tensor.untyped_storage().data_ptr() for tensor in LAYERS[layer].tensors()}


@pytest.mark.parametrize("name", ["absmax", "nested absmax", "offset", "offset of another weight", "code"])
def test_4_bit_weights_of_which_a_part_lies_elsewhere_are_not_taken_for_one(name: str, tmp_path: Path) -> None:
    policy = policy_of("Llama", torch.float32, True, tmp_path, hidden_size=256, num_key_value_heads=4)
    fuse(policy.model, QKV)
    states = [linear_of(policy.model, path).base_layer.weight.quant_state for path in MODULES[QKV]]
    if name == "absmax":
        states[1].absmax = states[1].absmax.clone()
    elif name == "nested absmax":
        states[1].state2.absmax = states[1].state2.absmax.clone()
    elif name == "offset":
        states[1].offset = states[1].offset + 1
    elif name == "offset of another weight":
        states[1].offset = states[0].offset
    else:
        states[1].code = states[1].code * 2
    borrow(policy.model)
    x = inputs(policy.model, QKV)
    assert len(LAYERS[QKV].products) == 3
    if name != "code":  # bitsandbytes itself does not look at it on the CPU
        close_to(ours(QKV, x), theirs(policy.model, QKV, x))


def storages(product: Product) -> set[int]:
    """The storages of a product's weight."""
    tensors = product.weight.tensors if isinstance(product.weight, NF4Weight) else (product.weight,)
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}


def test_one_product_reads_the_trainers_weights_as_they_change(tiny: peft.PeftModel) -> None:
    fuse(tiny, QKV)
    borrow(tiny)
    x = inputs(tiny, QKV)
    for path in MODULES[QKV]:
        tiny.get_base_model().get_submodule(path).base_layer.bias.data.add_(1)
        tiny.get_base_model().get_submodule(path).base_layer.weight.data.mul_(2)
    close_to(ours(QKV, x), theirs(tiny, QKV, x))


@pytest.mark.parametrize("order", [[0, 2, 1], [1, 0, 2], [2, 1, 0]])
def test_weights_that_are_adjacent_in_another_order_are_not_taken_for_one(
    tiny: peft.PeftModel, order: list[int]
) -> None:
    modules = [tiny.get_base_model().get_submodule(path) for path in MODULES[QKV]]
    fuse_plain([modules[number] for number in order])
    borrow(tiny)
    x = inputs(tiny, QKV)
    assert len(LAYERS[QKV].products) == 3
    close_to(ours(QKV, x), theirs(tiny, QKV, x))


# the opaque op


def test_the_op_is_sound_for_compilers() -> None:
    model = with_adapter(load_model("tiny"))
    borrow(model)
    x = inputs(model, OUT)
    torch.library.opcheck(borrowed_linear, (x, LAYERS[OUT].out_features, OUT),
                          test_utils=("test_schema", "test_faketensor"))


def test_the_op_keeps_no_graph(tiny: peft.PeftModel) -> None:
    borrow(tiny)
    assert not ours(QKV, inputs(tiny, QKV)).requires_grad


# changes under a live engine


def reallocated(parameter: Any) -> None:
    parameter.data = parameter.data.clone()


def linear_of(model: Any, path: str = MODULES[QKV][1]) -> Any:
    return model.get_base_model().get_submodule(path)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "weight": (lambda model: reallocated(linear_of(model).base_layer.weight), "qkv_proj: .*moved or replaced"),
    "bias": (lambda model: reallocated(linear_of(model).base_layer.bias), "qkv_proj: .*moved or replaced"),
    "dtype": (lambda model: model.to(torch.float64), "float64"),
    "scale": (lambda model: linear_of(model).scale_layer(2.0), "scale of adapter 'default' changed"),
    "norm": (lambda model: reallocated(model.get_base_model().model.norm.weight), "model.norm.weight: .*moved"),
    "embedding": (lambda model: reallocated(model.get_input_embeddings().weight), "embed_tokens.weight: .*moved"),
    "embedding resized": (lambda model: model.resize_token_embeddings(700), "embed_tokens.weight: .*moved"),
    "merged": (lambda model: model.merge_adapter(), "was merged"),
    "merged and unloaded": (lambda model: model.merge_and_unload(), "q_proj: the trainer's module was replaced"),
    "unloaded": (lambda model: model.unload(), "q_proj: the trainer's module was replaced"),
    "adapter deleted": (lambda model: model.delete_adapter("default"), "adapter 'default' changed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_under_an_engine_is_refused_by_name(tiny: peft.PeftModel, change: str) -> None:
    borrowing = borrow(tiny)
    borrowing.check()
    act, message = CHANGES[change]
    act(tiny)
    with pytest.raises(BorrowError, match=f"(?s){message}.*make a new one|{message}.*fast_inference"):
        borrowing.check()


def test_in_place_changes_are_no_reason_to_refuse(tiny: peft.PeftModel) -> None:
    borrowing = borrow(tiny)
    move_adapter(Policy(tiny), 1.0)
    tiny.get_base_model().model.norm.weight.data.mul_(2)
    tiny.merge_adapter()
    tiny.unmerge_adapter()
    borrowing.check()


@pytest.mark.parametrize("name", ["packed", "absmax", "nested"])
def test_a_requantized_layer_is_refused(name: str, tmp_path: Path) -> None:
    model = policy_of("tiny", torch.float32, True, tmp_path).model
    borrowing = borrow(model)
    weight = linear_of(model).base_layer.weight
    if name == "packed":
        weight.data = weight.data.clone()
    elif name == "absmax":
        weight.quant_state.absmax = weight.quant_state.absmax.clone()
    else:
        weight.quant_state.state2.absmax = weight.quant_state.state2.absmax.clone()
    with pytest.raises(BorrowError, match=r"qkv_proj: .*moved or replaced"):
        borrowing.check()


def test_a_freed_address_that_is_used_again_does_not_pass_for_the_old_tensor(tiny: peft.PeftModel) -> None:
    borrowing = borrow(tiny)
    weight = linear_of(tiny).base_layer.weight
    old = weight.data_ptr()
    for _ in range(3):
        weight.data = torch.empty(0)  # were it not held, the allocator would give this place away again
        weight.data = torch.zeros(linear_of(tiny).out_features, linear_of(tiny).in_features)
        assert weight.data_ptr() != old
    with pytest.raises(BorrowError, match="moved or replaced"):
        borrowing.check()


def test_an_adapter_put_on_a_bare_model_later_is_noticed() -> None:
    base = load_model("tiny")
    bare = Loan(base, CPU)
    bare.linear(QKV, PARTS)
    bare.check()
    with_adapter(base)
    with pytest.raises(BorrowError, match="q_proj: the trainer's module was replaced"):
        bare.check()


# which adapter


def second_adapter(model: Any, r: int = 4, alpha: int = 8, targets: Any = SPLIT, **options: Any) -> None:
    """Another adapter beside the first, and active."""
    model.add_adapter("saved", peft.LoraConfig(r=r, lora_alpha=alpha, target_modules=targets, **options))
    generator = torch.Generator().manual_seed(9)
    for name, parameter in model.named_parameters():
        if ".saved." in name and "lora" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    model.set_adapter("saved")


def values(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(("options", "target"), [
    ({}, QKV), ({"r": 2}, QKV), ({"alpha": 4}, OUT), ({"targets": ["q_proj", "up_proj"]}, QKV),
    ({"targets": ["q_proj", "up_proj"]}, OUT), ({"targets": ["q_proj", "up_proj"]}, GATE_UP),
])
def test_another_adapter_is_sampled_with_by_its_values_and_leaves_no_trace(
    tiny: peft.PeftModel, options: dict[str, Any], target: str, copied: bool
) -> None:
    slots = AdapterCopy(loras_of(tiny.get_base_model(), "default"), torch.float32, CPU, True) if copied else None
    borrowing = borrow(tiny, copied=slots)
    x = inputs(tiny, target)
    first = sampled(borrowing, target, x)
    second_adapter(tiny, **options)
    before, expected = values(tiny), theirs(tiny, target, x)
    places = addresses(target)
    close_to(sampled(borrowing, target, x), expected)
    assert addresses(target) == places
    assert all(torch.equal(value, before[name]) for name, value in values(tiny).items())
    tiny.set_adapter("default")
    assert torch.equal(sampled(borrowing, target, x), first)


@pytest.mark.parametrize(("options", "message"), [
    ({"r": 8}, "'saved' has rank 8, the one that this engine started with has rank 4"),
    ({"use_dora": True}, "variant of LoRA"), ({"lora_bias": True, "targets": ["q_proj"]}, "variant of LoRA"),
])
def test_an_adapter_that_does_not_fit_is_refused_by_name_and_changes_nothing(
    tiny: peft.PeftModel, options: dict[str, Any], message: str
) -> None:
    borrowing = borrow(tiny)
    second_adapter(tiny, **options)
    before = values(tiny)
    with pytest.raises(BorrowError, match=message):
        borrowing.take(False)
    assert all(torch.equal(value, before[name]) for name, value in values(tiny).items())


def test_an_adapter_on_a_layer_that_has_none_is_refused_by_name() -> None:
    model = peft.get_peft_model(load_model("tiny"), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model.add_adapter("saved", peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))
    borrowing = borrow(model)
    model.set_adapter("saved")
    with pytest.raises(BorrowError, match=r"o_proj: .*'saved' has rank 4, .*has no LoRA there"):
        borrowing.take(False)


def test_an_adapter_that_peft_turned_off_is_off_and_on_again(tiny: peft.PeftModel) -> None:
    borrowing = borrow(tiny)
    x = inputs(tiny, QKV)
    on = sampled(borrowing, QKV, x)
    with tiny.disable_adapter():
        expected = theirs(tiny, QKV, x)
        close_to(sampled(borrowing, QKV, x), expected)
    assert (on - expected).abs().max() > 0.01
    assert torch.equal(sampled(borrowing, QKV, x), on)
    close_to(sampled(borrowing, QKV, x, base_model=True), expected)


def test_the_base_model_of_a_second_adapter_is_the_base_model(tiny: peft.PeftModel) -> None:
    borrowing = borrow(tiny)
    x = inputs(tiny, QKV)
    second_adapter(tiny)
    with tiny.disable_adapter():
        expected = theirs(tiny, QKV, x)
        close_to(sampled(borrowing, QKV, x), expected)
    close_to(sampled(borrowing, QKV, x, base_model=True), expected)


def test_several_active_adapters_are_refused_by_name(tiny: peft.PeftModel) -> None:
    borrowing = borrow(tiny)
    second_adapter(tiny)
    tiny.base_model.set_adapter(["default", "saved"])
    with pytest.raises(BorrowError, match=r"\['default', 'saved'\] are active at once"):
        borrowing.take(False)
    with pytest.raises(BorrowError, match="are active at once"):
        borrow(tiny)


def test_an_adapter_turned_off_in_some_layers_is_refused_with_one_of_them(tiny: peft.PeftModel) -> None:
    borrowing = borrow(tiny)
    linear_of(tiny).enable_adapters(False)
    with pytest.raises(BorrowError, match=r"turned off in some layers \(.*k_proj\)"):
        borrowing.take(False)


def test_what_identifies_the_sampled_adapter_changes_with_it(tiny: peft.PeftModel) -> None:
    borrowing, seen = borrow(tiny), []

    def identity(base_model: bool = False) -> Any:
        return borrowing.take(base_model)

    assert identity() == identity()
    assert identity(base_model=True) == identity(base_model=True) != identity()
    seen.append(identity())
    move_adapter(Policy(tiny), 0.1)
    assert identity() not in seen
    second_adapter(tiny)
    assert identity() != identity()  # what a saved adapter holds may change with no sign of it


# adapters that are not plain LoRA


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


@pytest.mark.parametrize(("replace", "message"), [
    (lambda linear: setattr(linear, "weight", nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)), "int8"),
    (lambda linear: setattr(linear, "weight", nn.Parameter(linear.weight.to(torch.float8_e4m3fn))), "float8"),
])
def test_weights_of_another_format_are_refused_by_name(replace: Callable[[Any], None], message: str) -> None:
    model = load_model("tiny").requires_grad_(False)
    replace(model.get_submodule(OUT))
    with pytest.raises(BorrowError, match=f"o_proj has weights of torch.{message}"):
        Loan(model, CPU).linear(OUT, PARTS)


def test_a_layer_that_is_no_linear_layer_is_refused_by_name() -> None:
    model = load_model("tiny")
    with pytest.raises(BorrowError, match=r"self_attn is a Qwen2Attention; expected a torch.nn.Linear"):
        Loan(model, CPU).linear("model.layers.0.self_attn", PARTS)


def test_a_layer_that_the_trainer_lacks_is_named() -> None:
    with pytest.raises(BorrowError, match=r"Qwen2ForCausalLM has no module model.layers.0.mlp.experts"):
        Loan(load_model("tiny"), CPU).linear("model.layers.0.mlp.experts", PARTS)


@pytest.mark.parametrize(("name", "like"), [
    ("model.norm.weight", torch.empty(7)), ("model.norm.weight", torch.empty(384, dtype=torch.bfloat16)),
    ("model.extra_norm.weight", torch.empty(384)),
])
def test_a_parameter_without_counterpart_is_refused_by_name(name: str, like: Tensor) -> None:
    with pytest.raises(BorrowError, match=f"the engine's parameter {name} .* has no counterpart"):
        Loan(load_model("tiny"), CPU).parameter(name, like)


def test_weights_of_the_trainer_that_the_engine_has_no_place_for_are_named(tiny: peft.PeftModel) -> None:
    borrowing = borrow(tiny)
    with pytest.raises(BorrowError, match=r"no place for: \['model.layers.0.mlp.down_proj"):
        borrowing.check_complete()


# the rollout copy


@pytest.fixture
def slots(tiny: peft.PeftModel) -> AdapterCopy:
    return AdapterCopy(loras_of(tiny.get_base_model(), "default"), torch.float32, CPU, published=True)


def test_a_rollout_copy_changes_when_published_and_not_before(tiny: peft.PeftModel, slots: AdapterCopy) -> None:
    borrowing = borrow(tiny, copied=slots)
    x = inputs(tiny, QKV)
    first = theirs(tiny, QKV, x)
    move_adapter(Policy(tiny), 0.5, seed=4)
    close_to(sampled(borrowing, QKV, x), first)
    borrowing.publish(7)
    second = theirs(tiny, QKV, x)
    close_to(ours(QKV, x), first)  # a call under way goes on with what it began with
    move_adapter(Policy(tiny), 0.5, seed=5)
    close_to(sampled(borrowing, QKV, x), second)
    assert slots.version == 7
    assert (first - second).abs().max() > 0.1


def test_the_slots_of_a_rollout_copy_never_move_and_are_adjacent(tiny: peft.PeftModel, slots: AdapterCopy) -> None:
    fuse(tiny, QKV)
    borrowing = borrow(tiny, copied=slots)
    (product,) = LAYERS[QKV].products
    assert product.stack_a is not None
    assert product.stack_b is not None
    places = [room.data_ptr() for room in slots.rooms], product.stack_a.data_ptr()
    for version in range(3):
        move_adapter(Policy(tiny), 0.5, seed=version)
        borrowing.publish(version)
        x = inputs(tiny, QKV)
        close_to(sampled(borrowing, QKV, x), theirs(tiny, QKV, x))
    assert places == ([room.data_ptr() for room in slots.rooms], product.stack_a.data_ptr())


def test_a_rollout_copy_outlives_the_engine_that_samples_with_it(tiny: peft.PeftModel, slots: AdapterCopy) -> None:
    borrowing = borrow(tiny, copied=slots)
    x = inputs(tiny, QKV)
    first = sampled(borrowing, QKV, x)
    borrowing.close()
    move_adapter(Policy(tiny), 0.5, seed=4)
    close_to(sampled(borrow(tiny, copied=slots), QKV, x), first)


@pytest.mark.parametrize("published", [False, True])
def test_a_live_adapter_may_move_while_a_copy_is_sampled_with(
    tiny: peft.PeftModel, slots: AdapterCopy, published: bool
) -> None:
    borrowing = borrow(tiny, copied=slots if published else None)
    reallocated(linear_of(tiny).lora_A["default"].weight)
    reallocated(linear_of(tiny).lora_B["default"].weight)
    borrowing.check()
    move_adapter(Policy(tiny), 0.5, seed=4)
    borrowing.publish(1)
    x = inputs(tiny, QKV)
    close_to(sampled(borrowing, QKV, x), theirs(tiny, QKV, x))


def test_publishing_an_adapter_of_another_shape_is_refused(tiny: peft.PeftModel, slots: AdapterCopy) -> None:
    borrowing = borrow(tiny, copied=slots)
    tiny.delete_adapter("default")
    with pytest.raises(BorrowError, match="shape or scale of adapter 'default' changed"):
        borrowing.publish(1)


# the end


def test_closing_lets_go_of_the_trainer_whoever_holds_a_layer(tiny: peft.PeftModel) -> None:
    borrowing = borrow(tiny)
    held: list[BorrowedLinear] = list(borrowing.linears.values())
    borrowing.close()
    borrowing.close()
    assert not LAYERS
    assert all(not linear.modules and not linear.products and not linear.held for linear in held)


def test_closing_an_old_borrowing_leaves_a_new_one_alone(tiny: peft.PeftModel) -> None:
    old = borrow(tiny)
    new = borrow(copy.deepcopy(tiny))
    old.close()
    assert new.linears == LAYERS


def test_nothing_else_is_allocated_to_borrow(tiny: peft.PeftModel) -> None:
    for linear in borrow(tiny).linears.values():
        own = {tensor.untyped_storage().data_ptr() for tensor in linear.tensors()}
        assert {storage for product in linear.products for storage in storages(product)} <= own
    assert borrowed.LAYERS
