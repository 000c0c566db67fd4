"""Borrowed layers without an engine: the trainer's own outputs from its frozen weights and a copy of its adapter."""

import copy
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from card import CPU
from memory import CountedOps
from small_models import load_model, random_model, scatter, with_adapter
from torch import Tensor, nn
from vllm_models import (
    GATE_UP,
    LAYER,
    MODULES,
    OUT,
    PARTS,
    QKV,
    addresses,
    borrow,
    close_to,
    fuse,
    fuse_plain,
    inputs,
    linear_of,
    move_adapter,
    ours,
    policy_of,
    reallocated,
    sampled,
    theirs,
)

from lowmem_grpo.engines.vllm.shared_linear import LAYERS, BorrowError, Product, borrowed_linear
from lowmem_grpo.engines.vllm.weight_sharing import WeightSharing, loras_of
from lowmem_grpo.models.policy import Policy

pytestmark = pytest.mark.usefixtures("no_layers_left")
KINDS = {"float32": (torch.float32, False), "bfloat16": (torch.bfloat16, False), "nf4": (torch.float32, True),
         "nf4 in bfloat16": (torch.bfloat16, True), "fp8": (torch.float32, "fp8"),
         "fp8 by block in bfloat16": (torch.bfloat16, "fp8-block"), "nvfp4": (torch.float32, "nvfp4")}


SHORT = ("float32", "nf4 in bfloat16", "fp8")  # of the kinds, in the short lane
EACH_KIND = [pytest.param(kind, marks=[] if kind in SHORT else pytest.mark.slow) for kind in KINDS]


@pytest.fixture(params=EACH_KIND)
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Policy:
    """The shallow model, whose q, k and v have biases, with an adapter that does something; of each weight type."""
    policy = policy_of("shallow", *KINDS[request.param], tmp_path)
    move_adapter(policy, 0.05)
    return policy


def test_a_borrowed_layer_gives_the_trainers_outputs_also_of_an_adapter_that_changed_in_place(policy: Policy) -> None:
    loan, given = borrow(policy.model), {layer: inputs(policy.model, layer) for layer in MODULES}
    before = {layer: sampled(loan, layer, x) for layer, x in given.items()}
    for weight in policy.trainable:  # through its address, as bitsandbytes' optimizers do: no counter sees it
        values = (5 * weight.detach()).contiguous()
        ctypes.memmove(weight.data_ptr(), values.data_ptr(), values.nbytes)
    for layer, x in given.items():  # a call that has begun goes on with what it began with
        assert torch.equal(ours(layer, x), before[layer])
    for layer, many in given.items():
        assert (sampled(loan, layer, many) - before[layer]).abs().max() > 0.1
        for x in (many, inputs(policy.model, layer, 1), inputs(policy.model, layer, 6)[None]):
            got = ours(layer, x)
            assert got.dtype == x.dtype and got.shape == (*x.shape[:-1], LAYERS[layer].out_features)
            close_to(got, theirs(policy.model, layer, x))


def test_zeros_in_the_same_places_give_the_base_model(policy: Policy) -> None:
    loan = borrow(policy.model)
    for layer in MODULES:
        x, places = inputs(policy.model, layer), addresses(layer)
        before = sampled(loan, layer, x)
        with policy.base_model():
            close_to(sampled(loan, layer, x, base_model=True), theirs(policy.model, layer, x))
        assert torch.equal(sampled(loan, layer, x), before)
        assert addresses(layer) == places


def test_a_layer_casts_or_joins_nothing_when_it_is_called(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowmem_grpo.kernels.custom_op.WITHOUT_16_BITS", False)  # of the CPU, which then casts
    borrow(policy.model)
    for layer in MODULES:
        x = inputs(policy.model, layer)
        with CountedOps() as ops:
            LAYERS[layer].products[0].forward(x)
        assert not {"aten::cat", "aten::_to_copy", "aten::zeros", "aten::new_zeros"} & set(ops.names), layer


@pytest.mark.parametrize("fused", [False, True])
def test_the_copy_has_the_engines_dtype_and_2_bytes_a_number_of_a_16_bit_model(fused: bool, tmp_path: Path) -> None:
    model = policy_of("llama", torch.bfloat16, True, tmp_path, hidden_size=256, num_key_value_heads=4).model
    if fused:
        fuse(model, QKV)
    room = borrow(model).copy.room
    numbers = sum(lora.a.numel() + lora.b.numel() for lora in loras_of(model.get_base_model(), "default"))
    assert room.dtype == torch.bfloat16
    assert room.nbytes == 2 * numbers
    for product in LAYERS[QKV].products:
        assert product.one_kernel
        assert {part.untyped_storage().data_ptr() for part in (product.stack_a, product.stack_b)} == {
            room.untyped_storage().data_ptr()}


def test_lora_on_some_projections_of_a_gated_delta_net_is_right() -> None:
    """vLLM's own LoRA fails there (vllm 47639); a layer of ours applies what each projection has."""
    base = random_model("Qwen3_5").requires_grad_(False)
    config = peft.LoraConfig(r=4, target_modules=["in_proj_qkv", "in_proj_a", "out_proj"], rank_pattern={"out_proj": 2})
    model = scatter(peft.get_peft_model(base, config))
    loan, start = WeightSharing(base, CPU), "model.layers.0.linear_attn."
    parts = {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"], "in_proj_ba": ["in_proj_b", "in_proj_a"]}
    for name, modules in (parts | {"out_proj": ["out_proj"]}).items():
        loan.linear(start + name, parts)
        theirs = [model.get_base_model().get_submodule(start + module) for module in modules]
        x = torch.randn(3, theirs[0].in_features)
        loan.use_policy(False)
        close_to(ours(start + name, x), torch.cat([module(x) for module in theirs], -1))


@pytest.mark.parametrize("four_bit", [False, True])
def test_layers_with_different_ranks_scales_and_without_lora_are_right(four_bit: bool, tmp_path: Path) -> None:
    whole = policy_of("llama", torch.float32, four_bit, tmp_path, hidden_size=256, num_key_value_heads=4).model
    fuse(whole, QKV)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"],
                             rank_pattern={"v_proj": 2}, alpha_pattern={"v_proj": 3})
    model = peft.get_peft_model(whole.unload(), config).eval()
    move_adapter(Policy(model), 0.3)
    loan = borrow(model)
    assert len(LAYERS[QKV].products) == 1
    for seed in (1, 8):
        move_adapter(Policy(model), 0.3, seed=seed)
        for layer in MODULES:
            x = inputs(model, layer)
            close_to(sampled(loan, layer, x), theirs(model, layer, x))


# one product where weights are adjacent


@pytest.mark.parametrize("kind", EACH_KIND)
def test_adjacent_weights_take_one_product_with_the_same_result(kind: str, tmp_path: Path) -> None:
    # blocks of double quantization are 16,384 elements: the widths here make each weight end with one
    policy = policy_of("llama", *KINDS[kind], tmp_path, hidden_size=256, num_key_value_heads=4, intermediate_size=256)
    move_adapter(policy, 0.05)
    for layer in (QKV, GATE_UP):
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


ELSEWHERE: dict[str, Callable[[Any, Any], None]] = {  # of the first state and the second, which changes
    "absmax": lambda first, second: setattr(second, "absmax", second.absmax.clone()),
    "nested absmax": lambda first, second: setattr(second.state2, "absmax", second.state2.absmax.clone()),
    "offset": lambda first, second: setattr(second, "offset", second.offset + 1),
    "offset of another weight": lambda first, second: setattr(second, "offset", first.offset),
    "code": lambda first, second: setattr(second, "code", second.code * 2),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_4_bit_weights_of_which_a_part_lies_elsewhere_are_not_taken_for_one(name: str, tmp_path: Path) -> None:
    policy = policy_of("llama", torch.float32, True, tmp_path, hidden_size=256, num_key_value_heads=4)
    fuse(policy.model, QKV)
    first, second = (linear_of(policy.model, path).base_layer.weight.quant_state for path in MODULES[QKV][:2])
    ELSEWHERE[name](first, second)
    borrow(policy.model)
    x = inputs(policy.model, QKV)
    assert len(LAYERS[QKV].products) == 3
    if name != "code":  # bitsandbytes itself does not look at it on the CPU
        close_to(ours(QKV, x), theirs(policy.model, QKV, x))


def storages(product: Product) -> set[int]:
    """The storages of a product's weight."""
    tensors = [product.weight] if isinstance(product.weight, Tensor) else product.weight.tensors
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_weights_that_are_adjacent_in_another_order_are_not_taken_for_one(tiny: peft.PeftModel) -> None:
    modules = [tiny.get_base_model().get_submodule(path) for path in MODULES[QKV]]
    fuse_plain([modules[number] for number in (0, 2, 1)])
    borrow(tiny)
    x = inputs(tiny, QKV)
    assert len(LAYERS[QKV].products) == 3
    close_to(ours(QKV, x), theirs(tiny, QKV, x))


# the opaque op


def test_the_op_is_sound_for_compilers() -> None:
    model = with_adapter(load_model("shallow"))
    borrow(model)
    x = inputs(model, OUT)
    torch.library.opcheck(borrowed_linear, (x, LAYERS[OUT].out_features, OUT),
                          test_utils=("test_schema", "test_faketensor"))


# changes under a live engine


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "weight": (lambda model: reallocated(linear_of(model).base_layer.weight), "qkv_proj: .*moved or replaced"),
    "bias": (lambda model: reallocated(linear_of(model).base_layer.bias), "qkv_proj: .*moved or replaced"),
    "dtype": (lambda model: model.to(torch.float64), "float64"),
    "scale": (lambda model: linear_of(model).scale_layer(2.0), "scale of adapter 'default' changed"),
    "norm": (lambda model: reallocated(model.get_base_model().model.norm.weight), "model.norm.weight: .*moved"),
    "embedding": (lambda model: reallocated(model.get_input_embeddings().weight), "embed_tokens: .*moved"),
    "embedding resized": (lambda model: model.resize_token_embeddings(700), "embed_tokens: .*moved"),
    "merged": (lambda model: model.merge_adapter(), "was merged"),
    "merged and unloaded": (lambda model: model.merge_and_unload(), "q_proj: the trainer's module was replaced"),
    "unloaded": (lambda model: model.unload(), "q_proj: the trainer's module was replaced"),
    "adapter deleted": (lambda model: model.delete_adapter("default"), "adapter 'default' changed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_under_an_engine_is_refused_by_name(tiny: peft.PeftModel, change: str) -> None:
    loan = borrow(tiny)
    loan.check()
    act, message = CHANGES[change]
    act(tiny)
    with pytest.raises(BorrowError, match=f"(?s){message}.*make a new one|{message}.*fast_inference"):
        loan.check()


def test_in_place_changes_are_no_reason_to_refuse(tiny: peft.PeftModel) -> None:
    loan = borrow(tiny)
    move_adapter(Policy(tiny), 1.0)
    tiny.get_base_model().model.norm.weight.data.mul_(2)
    tiny.merge_adapter()
    tiny.unmerge_adapter()
    loan.check()


@pytest.mark.parametrize("name", ["packed", "absmax", "nested absmax"])
def test_a_requantized_layer_is_refused(name: str, tmp_path: Path) -> None:
    model = policy_of("shallow", torch.float32, True, tmp_path).model
    loan = borrow(model)
    weight = linear_of(model).base_layer.weight
    if name == "packed":
        reallocated(weight)
    else:
        ELSEWHERE[name](None, weight.quant_state)
    with pytest.raises(BorrowError, match=r"qkv_proj: .*moved or replaced"):
        loan.check()


def test_a_freed_address_that_is_used_again_does_not_pass_for_the_old_tensor(tiny: peft.PeftModel) -> None:
    loan = borrow(tiny)
    weight = linear_of(tiny).base_layer.weight
    old = weight.data_ptr()
    for _ in range(3):
        weight.data = torch.empty(0)  # were it not held, the allocator would give this place away again
        weight.data = torch.zeros(linear_of(tiny).out_features, linear_of(tiny).in_features)
        assert weight.data_ptr() != old
    with pytest.raises(BorrowError, match="moved or replaced"):
        loan.check()


@pytest.mark.parametrize(("act", "message"), [
    (lambda loan: reformat(loan.base.get_submodule(OUT), torch.int8) or loan.linear(OUT, PARTS),
     "o_proj has weights of torch.int8"),
    (lambda loan: reformat(loan.base.get_submodule(OUT), torch.float8_e4m3fn) or loan.linear(OUT, PARTS),
     "o_proj has weights of torch.float8"),
    (lambda loan: loan.linear(LAYER + "self_attn", PARTS), "self_attn is a Qwen2Attention; expected a torch.nn.Linear"),
    (lambda loan: loan.linear(LAYER + "mlp.experts", PARTS), "Qwen2ForCausalLM has no module model.layers.0.mlp.exp"),
    (lambda loan: loan.parameter("model.norm.weight", torch.empty(7)), "parameter model.norm.weight .* no counterpart"),
    (lambda loan: loan.parameter("model.norm.weight", torch.empty(384, dtype=torch.bfloat16)), "has no counterpart"),
    (lambda loan: loan.parameter("model.extra.weight", torch.empty(384)), "model.extra.weight .* has no counterpart"),
    (lambda loan: loan.check_complete(), r"no place for: \['model.embed_tokens.weight"),
], ids=range(8))
def test_what_does_not_map_onto_the_engine_is_refused_by_name(act: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(BorrowError, match=message):
        act(WeightSharing(load_model("shallow").requires_grad_(False), CPU))


def reformat(linear: Any, dtype: torch.dtype) -> None:
    linear.weight = nn.Parameter(linear.weight.to(dtype), requires_grad=False)


# the end


def test_closing_an_old_loan_leaves_a_new_one_alone(tiny: peft.PeftModel) -> None:
    old = borrow(tiny)
    new = borrow(copy.deepcopy(tiny))
    old.close()
    assert new.linears == LAYERS
