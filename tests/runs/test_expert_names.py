"""LoRA on experts in PEFT's own files, on transformers' own gpt-oss: read under the model's names, and written back."""

import copy
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_oss import gpt_oss_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowmem_grpo.runs.adapter_file import layers_of
from lowmem_grpo.runs.expert_names import named_in_model, names_in_file, settings_in_file, settings_in_model
from lowmem_grpo.runs.saved_adapter import AdapterError

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
STACKS = [f"model.layers.{layer}.{name}" for layer in range(2) for name in BOTH]
CASES: dict[str, dict[str, Any]] = {
    "both stacks": {"target_modules": ["q_proj", "o_proj"], "target_parameters": BOTH},
    "one stack, with its own rank": {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"],
                                     "rank_pattern": {"experts.down_proj": 3}},
    "no attention": {"target_modules": [], "target_parameters": BOTH},
    "other stacks in each layer": {"target_modules": "all-linear", "target_parameters": [
        "model.layers.0.mlp.experts.down_proj", "layers.1.mlp.experts.gate_up_proj"]},
    "a pattern": {"target_modules": r".*(q|v)_proj", "target_parameters": BOTH},
    "attention of one layer": {"target_modules": ["q_proj"], "layers_to_transform": [1], "target_parameters": BOTH},
}


@cache
def plain() -> Any:
    """Never changed."""
    return gpt_oss_model(experts=4)


def saved_by_peft(folder: Path, **settings: Any) -> Path:
    """An adapter with random factors."""
    torch.manual_seed(1)
    model = get_peft_model(copy.deepcopy(plain()), LoraConfig(r=2, task_type="CAUSAL_LM", **settings))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.2)
    model.save_pretrained(str(folder))
    return folder


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    """What PEFT computes with a saved adapter."""
    ids = torch.arange(3, 40)[None]
    return PeftModel.from_pretrained(copy.deepcopy(plain()), str(folder)).eval()(input_ids=ids).logits


@pytest.mark.parametrize("case", CASES)
def test_a_file_of_peft_is_read_under_the_models_names_and_written_as_one_with_pefts_logits(
    case: str, tmp_path: Path
) -> None:
    folder = saved_by_peft(tmp_path / "theirs", **CASES[case])
    settings, stored = json.loads((folder / "adapter_config.json").read_text()), load_file(
        folder / "adapter_model.safetensors")
    tensors = named_in_model(stored, settings, folder)
    layers = [layer.removeprefix("base_model.model.") for layer in layers_of(tensors)]
    outputs = {name.split(".")[-3]: len(tensor) for name, tensor in tensors.items()
               if "experts" in name and "lora_B" in name}
    assert outputs.items() <= {"gate_up_proj": 192, "down_proj": 64}.items() and outputs
    here = settings_in_model(settings, layers)
    assert here["target_parameters"] is None
    written = names_in_file(tensors)
    assert {written[name]: tensor for name, tensor in tensors.items()} == stored
    ours = Path(shutil.copytree(folder, tmp_path / "ours"))
    save_file({written[name]: tensor for name, tensor in tensors.items()}, ours / "adapter_model.safetensors")
    (ours / "adapter_config.json").write_text(json.dumps(settings_in_file(here, layers, STACKS)))
    assert torch.equal(logits(ours), logits(folder))


def test_settings_name_stacks_of_all_layers_at_once_and_no_module_that_transformers_lacks(tmp_path: Path) -> None:
    here = {"target_modules": ["q_proj", "gate_up_proj", "down_proj"]}
    attention = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    assert settings_in_file(here, [*attention, *STACKS], STACKS) == {
        "target_modules": ["q_proj"], "target_parameters": BOTH}
    assert settings_in_file(here, [*attention, *STACKS[:3]], STACKS) == {
        "target_modules": ["q_proj"], "target_parameters": [BOTH[0], STACKS[1]]}
    assert settings_in_file(here, ["model.layers.0.mlp.down_proj"], []) == here  # of a dense layer


def test_a_file_whose_settings_do_not_name_its_experts_is_refused(tmp_path: Path) -> None:
    folder = saved_by_peft(tmp_path / "saved", **CASES["both stacks"])
    stored = load_file(folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"experts\..*target_parameters .* name 0 stacks"):
        named_in_model(stored, {"target_parameters": None}, folder)
    with pytest.raises(AdapterError, match=r"base_layer\.lora_A.* name 1 stacks"):
        named_in_model(stored, {"target_parameters": BOTH[1:]}, folder)
