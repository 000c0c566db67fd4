"""A merged model in 4 bits is what plain transformers makes of the merged model in 16 bits, with bitsandbytes."""

from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from export_tools import adapted, export_command
from mixtures import mixture_folder
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.models.export import formats, four_bit
from lowmem_grpo.models.export.folder import ExportError

NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                         bnb_4bit_compute_dtype=torch.bfloat16)
IDS = torch.arange(3, 30)[None]


@pytest.mark.parametrize("base_in_4bit", [False, True])
def test_plain_transformers_loads_the_weights_that_it_would_quantize_itself(base_in_4bit: bool, tmp_path: Path) -> None:
    model = adapted(base_in_4bit)
    model.save_pretrained_merged(tmp_path / "16")
    folder = model.save_pretrained_merged(tmp_path / "4", save_method="merged_4bit_forced")
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "16", quantization_config=NF4, dtype=torch.bfloat16)
    stored: Any = AutoModelForCausalLM.from_pretrained(folder)
    wanted, held = plain.state_dict(), stored.state_dict()
    assert wanted.keys() == held.keys() and sum(name.endswith("absmax") for name in held) >= 42
    assert all(torch.equal(wanted[name], held[name]) for name in wanted)
    assert torch.equal(plain(IDS).logits, stored(IDS).logits)
    dense: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "16", dtype=torch.float32)
    for name, module in stored.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            state: Any = module.weight.quant_state
            state.dtype = torch.float32  # of the values, which are rounded to it
            dense.get_submodule(name).weight.data = bitsandbytes.functional.dequantize_4bit(module.weight, state)
    ours, _ = FastLanguageModel.from_pretrained(str(folder), dtype="float32")
    torch.testing.assert_close(ours(input_ids=IDS).logits, dense(IDS).logits, atol=1e-4, rtol=1e-4)


def test_the_command_writes_it_and_says_that_it_rounds(tmp_path: Path) -> None:
    adapted(False).save_lora(tmp_path / "lora")
    done = export_command(tmp_path / "lora", "--format", "merged_4bit", "--out", tmp_path / "out")
    assert done.exit_code == 0 and "42 linear layers, whose values are rounded again" in done.output
    assert not (tmp_path / "out" / "merged").exists() and (tmp_path / "out" / "tokenizer.json").is_file()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").is_loaded_in_4bit


def test_a_mixture_of_experts_is_refused_before_it_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (formats, four_bit):
        monkeypatch.setattr(file, "write_folder", lambda *_: pytest.fail("it was merged first"))
    bare, _ = FastLanguageModel.from_pretrained(str(mixture_folder(tmp_path / "base")), load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(bare, r=4)
    with pytest.raises(ExportError, match="experts would stay in 16 bits"):
        model.save_pretrained_merged(tmp_path / "out", save_method="merged_4bit_forced")
    model.save_lora(tmp_path / "lora")
    done = export_command(tmp_path / "lora", "--format", "merged_4bit", "--out", tmp_path / "out")
    assert done.exit_code == 1 and "experts would stay in 16 bits" in done.output and not (tmp_path / "out").exists()
