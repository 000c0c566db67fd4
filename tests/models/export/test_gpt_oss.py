"""Exports of gpt-oss: its experts in MXFP4 are read from the checkpoint, and get the LoRA of all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_oss import gpt_oss_folder, plain_gpt_oss
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from lowmem_grpo.models.export.base_weights import stored_weights, tensor_files
from lowmem_grpo.models.export.merge import MergeError, check_merged, read_pairs, write_merged

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted_by_peft(base: Path, folder: Path) -> Any:
    """PEFT's own model with random LoRA on attention and experts, saved in `folder`."""
    torch.manual_seed(1)
    model = get_peft_model(plain_gpt_oss(base), LoraConfig(
        r=2, lora_alpha=3, task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj"], target_parameters=BOTH))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.1)
    model.save_pretrained(str(folder))
    return model


def test_stored_experts_are_read_as_transformers_decodes_them(tmp_path: Path) -> None:
    folder = gpt_oss_folder(tmp_path / "base", experts=4)
    wanted = plain_gpt_oss(folder).state_dict()
    weights = stored_weights(folder, None, "16bit", torch.bfloat16)
    assert {weight.name for weight in weights} == wanted.keys()
    for weight in weights:
        assert weight.shape == wanted[weight.name].shape
        assert torch.equal(weight.open()(1, 3).float(), wanted[weight.name][1:3]), weight.name


def test_a_merge_has_the_lora_of_all_experts_that_peft_merges(tmp_path: Path) -> None:
    base, out = gpt_oss_folder(tmp_path / "base", experts=4), tmp_path / "out"
    peft, pairs = adapted_by_peft(base, tmp_path / "adapter"), read_pairs(tmp_path / "adapter")
    weights = stored_weights(base, None, "16bit", torch.bfloat16)
    out.mkdir()
    write_merged(out, weights, pairs, torch.bfloat16)
    assert check_merged(out, tensor_files(out), weights, pairs).merged == 8  # 2 layers of attention, 2 of experts
    merged = load_file(out / "model.safetensors")
    for name, wanted in peft.merge_and_unload().state_dict().items():
        wrong = (merged[name] != wanted.bfloat16()).float().mean()
        assert wrong < 1e-3, name  # float32 rounds some sums otherwise
    for missing in ("layers.1.mlp.experts.down_proj", "layers.0.mlp.experts.gate_up_proj"):
        with pytest.raises(MergeError, match=f"layer model.{missing}.* is not in the base model"):
            write_merged(out, [weight for weight in weights if missing not in weight.name], pairs, torch.bfloat16)


def test_a_scale_that_is_nan_is_refused_with_the_tensors_name(tmp_path: Path) -> None:
    folder = gpt_oss_folder(tmp_path / "base", experts=4)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 1] = 255
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    read = {weight.name: weight for weight in stored_weights(folder, None, "16bit", torch.bfloat16)}
    with pytest.raises(ValueError, match=r"safetensors: model\.layers\.1\.mlp\.experts\.down_proj: 1 of .* scales are"):
        read["model.layers.1.mlp.experts.down_proj"].open()(2, 3)
