"""One place decides what is trained beside LoRA."""

from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from lowmem_grpo import FastLanguageModel, GRPOConfig
from lowmem_grpo.config.beside_lora import BESIDE
from lowmem_grpo.config.loading import GET_PEFT_MODEL
from lowmem_grpo.config.unsupported import Fixed
from lowmem_grpo.runs.saved_adapter import AdapterError
from lowmem_grpo.trainer.parts import bring_model


def test_what_is_allowed_in_one_place_is_trained_saved_loaded_and_brought(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for table in (BESIDE, GET_PEFT_MODEL):  # the second is made of the first
        monkeypatch.setitem(table, "modules_to_save", Fixed("", any_value=True))
    monkeypatch.setattr("lowmem_grpo.trainer.model_setup.check_trained", lambda names: None)
    model, _ = FastLanguageModel.from_pretrained("tiny", load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(model, r=2, target_modules=["q_proj"], modules_to_save=["model.norm"])
    copy = model.get_base_model().model.norm.modules_to_save["default"].weight
    copy.data.fill_(0.5)
    model.save_lora(tmp_path)
    loaded, _ = FastLanguageModel.from_pretrained(str(tmp_path))
    for taken in (loaded, bring_model(loaded, GRPOConfig(output_dir=str(tmp_path))).model):
        weights = get_peft_model_state_dict(taken)
        assert torch.equal(weights["base_model.model.model.norm.weight"], copy)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "norm" not in name}, file)
    with pytest.raises(AdapterError, match=r"lacks model\.norm, which its modules_to_save names"):
        FastLanguageModel.from_pretrained(str(tmp_path))
