"""Mixtures of experts: quantized while loading, the block in place of transformers' own, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SHAPES, family_model, saved_family
from memory import LiveStorage
from nf4_problem import in_4_bit
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lowmem_grpo import FastLanguageModel, GRPOConfig
from lowmem_grpo.kernels.nf4 import NF4Weight, nf4_dequantize
from lowmem_grpo.models.experts import RoutedBlock, expert_stacks, routed_blocks
from lowmem_grpo.models.pretrained import Pretrained
from lowmem_grpo.trainer.model_setup import Brought

MOE = "qwen3_moe"
EXPERTS = SHAPES[MOE]["num_experts"]
IDS = torch.arange(5, 45).view(2, 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_family(MOE, tmp_path_factory.mktemp(MOE))


def load(folder: Path, form: str = "nf4", dtype: torch.dtype = torch.float32) -> Any:
    return Pretrained(str(folder), str(folder), {}).load(dtype, "cpu", form)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_quantized_as_bitsandbytes_quantizes_their_whole_stack(folder: Path, dtype: torch.dtype) -> None:
    stored = load_file(folder / "model.safetensors")
    assert "model.layers.0.mlp.experts.5.up_proj.weight" in stored  # one tensor for each expert
    whole = family_model(MOE).to(dtype).state_dict()
    for name, module in load(folder, dtype=dtype).named_modules():
        if name.endswith(("gate_up_proj", "down_proj")):
            wanted = NF4Weight.from_bitsandbytes(in_4_bit(whole[name].flatten(0, 1), double=True))
            held = module.frozen.weight
            assert held.shape == wanted.shape and held.dtype == dtype
            for ours, theirs in zip(held.tensors, wanted.tensors, strict=True):
                assert torch.equal(ours, theirs), name


def test_in_4_bits_the_model_is_the_one_of_the_dequantized_experts(tmp_path: Path) -> None:
    saved_family(MOE, tmp_path, hidden_size=64)  # no block of bitsandbytes' own layers spans two rows
    model, plain = load(tmp_path), load(tmp_path, "16bit")
    for name, parameter in model.named_parameters():
        if getattr(parameter, "quant_state", None):
            plain.get_parameter(name).data = nf4_dequantize(NF4Weight.from_bitsandbytes(parameter))
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, plain(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_loading_needs_room_for_the_experts_of_one_layer_in_16_bits_at_most(tmp_path: Path) -> None:
    """A layer's 64 experts of 3 x 32 x 128 weights are 1.5 MiB in bfloat16; there are 3 layers."""
    saved_family(MOE, tmp_path, num_experts=64, moe_intermediate_size=32, hidden_size=128, num_hidden_layers=3)
    layer = 2 * 64 * 3 * 32 * 128
    with LiveStorage() as storage:
        model = load(tmp_path, dtype=torch.bfloat16)
    assert storage.live < 3 * layer * 0.35
    assert storage.live + layer / 2 < storage.peak <= storage.live + layer  # stored in float32, so copies are made
    assert all(stack.weight.quant_state for stack in expert_stacks(model))


def test_missing_experts_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"no model.layers.1.mlp.experts.3.up_proj.weight.*Fetch it again"):
        load(tmp_path)


def test_experts_that_end_within_a_block_are_refused_before_they_are_read(tmp_path: Path) -> None:
    saved_family(MOE, tmp_path, moe_intermediate_size=3)
    with pytest.raises(ValueError, match=r"expert's matrix is 32 x 3, .*Load the model with load_in_4bit=False"):
        load(tmp_path)


@pytest.mark.parametrize("form", ["nf4", "16bit"])
def test_the_frozen_router_carries_gradient_to_the_hidden_states_and_is_renormalised_in_float32(
    form: str, folder: Path
) -> None:
    block = next(routed_blocks(load(folder, form, torch.bfloat16)))
    rows = torch.randn(9, 32, dtype=torch.bfloat16, requires_grad=True)
    ids, values = block.route(rows)
    assert ids.shape == (9, 2) and values.dtype == torch.float32
    torch.testing.assert_close(values.sum(-1), torch.ones(9))
    (values * torch.tensor([1.0, -1.0])).sum().backward()
    assert rows.grad is not None and rows.grad.any()
    assert not any(parameter.requires_grad for parameter in block.parameters())


@pytest.mark.parametrize("targets", [["gate_proj", "q_proj"], ["down_proj"], ["gate"], ["experts"], ["gate_up_proj"]])
def test_lora_on_experts_or_their_router_is_refused_by_name(targets: list[str], folder: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=64, load_in_4bit=False)
    words = r"names .*LoRA goes on attention only.*target_modules=\['q_proj', 'k_proj', 'v_proj', 'o_proj'\]"
    with pytest.raises(ValueError, match=words):
        FastLanguageModel.get_peft_model(model, target_modules=targets)


def test_all_linear_is_attention_where_experts_stay_frozen(folder: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=64)
    adapted = FastLanguageModel.get_peft_model(model, r=2, target_modules="all-linear")
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 4 and all(".self_attn." in name for name in trained)


@pytest.mark.parametrize(("stored", "words"), [
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, r"stored in FP8.*Take its checkpoint in 16 bits"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"stored in 4 bits.*load it with load_in_4bit=True"),
])
def test_experts_that_are_stored_quantized_are_refused(
    stored: dict[str, Any], words: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    with pytest.raises(ValueError, match=words):
        load(tmp_path)


def test_a_brought_model_gets_our_blocks_and_one_with_experts_in_16_bits_is_refused(folder: Path) -> None:
    def brought(**options: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        return Brought(model, None, LoraConfig(target_modules=["q_proj"]), None, GRPOConfig(), 64).trainable()

    assert sum(isinstance(one, RoutedBlock) for one in brought().modules()) == 2
    with pytest.raises(ValueError, match=r"its experts are not: they would stay in 16 bits.*from_pretrained\(name"):
        brought(quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"))
