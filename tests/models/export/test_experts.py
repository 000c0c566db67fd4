"""Merged mixtures of experts: written expert by expert, with the values of the run, and loaded by transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from export_tools import export_command
from families import GROUPS, loaded, saved_family
from packed_problem import alone, batch_of, learned
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lowmem_grpo.models.experts import routed_blocks
from lowmem_grpo.models.export.gguf import GGUFContent
from lowmem_grpo.models.policy import Policy


@pytest.mark.slow
@pytest.mark.parametrize("four_bit", [False, True], ids=["16 bits", "NF4"])
def test_a_merge_of_files_is_that_of_the_loaded_model_expert_by_expert(four_bit: bool, tmp_path: Path) -> None:
    folder = saved_family("qwen3_moe", tmp_path / "base", hidden_size=64, num_experts=11)
    model, tokenizer = loaded(folder, load_in_4bit=four_bit)
    model.save_lora(tmp_path / "adapter")
    model.save_pretrained_merged(str(tmp_path / "live"), tokenizer)
    done = export_command(tmp_path / "adapter", "--out", tmp_path / "files")
    assert done.exit_code == 0, done.output
    live, files = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "files"))
    assert live.keys() == files.keys() and not any("gate_up" in name for name in live)
    assert all(torch.equal(files[name], tensor) for name, tensor in live.items())
    held: Any = next(routed_blocks(model)).experts.gate_up_proj.frozen.expert(10)
    values = held.dequantized()
    assert torch.equal(files["model.layers.0.mlp.experts.10.up_proj.weight"], values[16:].bfloat16())


def test_plain_transformers_computes_with_a_merged_model_what_was_trained(tmp_path: Path) -> None:
    folder, batch = saved_family("qwen3_moe", tmp_path / "base"), batch_of(GROUPS)
    model, tokenizer = loaded(folder, load_in_4bit=True)
    trained, _ = learned(Policy(model), batch)
    model.save_pretrained_merged(str(tmp_path / "merged"), tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        assert abs((alone(plain, batch) - trained).mean()) < 0.01  # weights were rounded to 16 bits


def test_stacks_of_experts_count_as_weights_of_a_gguf_file() -> None:
    content = GGUFContent("qwen3moe", {"a": (4, 8), "ffn_gate_exps": (4, 8, 3), "norm": (8,)})
    assert content.elements == 32 + 96
