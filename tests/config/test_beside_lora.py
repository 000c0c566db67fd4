"""One place decides what is trained beside LoRA."""

from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from lowmem_grpo import FastLanguageModel, GRPOConfig
from lowmem_grpo.runs.saved_adapter import AdapterError
from lowmem_grpo.trainer.parts import bring_model


def test_what_is_allowed_in_one_place_is_trained_saved_loaded_and_brought(tmp_path: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained("tiny", load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(model, r=2, target_modules=["q_proj", "embed_tokens"])
    copy = model.get_base_model().model.embed_tokens.modules_to_save["default"].weight
    copy.data.fill_(0.5)
    model.save_lora(tmp_path)
    loaded, _ = FastLanguageModel.from_pretrained(str(tmp_path))
    for taken in (loaded, bring_model(loaded, GRPOConfig(output_dir=str(tmp_path))).model):
        weights = get_peft_model_state_dict(taken)
        assert torch.equal(weights["base_model.model.model.embed_tokens.weight"], copy)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "embed" not in name}, file)
    with pytest.raises(AdapterError, match=r"lacks embed_tokens, which its modules_to_save names"):
        FastLanguageModel.from_pretrained(str(tmp_path))
