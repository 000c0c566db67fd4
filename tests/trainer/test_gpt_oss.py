"""Runs on a small gpt-oss, with LoRA on attention and on all experts: one stops and goes on, one is brought by PEFT."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_oss import gpt_oss_folder, plain_gpt_oss
from peft import LoraConfig, PeftModel, get_peft_model
from trainer_runs import adapter, by_letters, make, same

from lowmem_grpo import FastLanguageModel, GRPOTrainer
from lowmem_grpo.runs.checkpoint import load_weights
from tests.attacks.small_run import StopAt, differences

IDS = torch.arange(3, 60)[None]


def run(folder: Path, out: Path, **settings: Any) -> GRPOTrainer:
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=256, dtype=torch.float32, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(model, r=2, use_gradient_checkpointing=False, target_modules=[
        "q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    return make(out, by_letters, model=model, max_steps=3, beta=0.02, num_iterations=2, save_strategy="steps",
                save_steps=1, **settings)


@pytest.mark.slow
def test_a_run_that_stopped_and_went_on_is_the_undisturbed_one_and_plain_peft_reads_its_checkpoints(
    tmp_path: Path
) -> None:
    folder = gpt_oss_folder(tmp_path / "base", experts=8)
    straight = run(folder, tmp_path / "straight")
    assert straight.train().finished
    assert not run(folder, tmp_path / "parts", callbacks=[StopAt(2)]).train().finished
    second = run(folder, tmp_path / "parts")
    assert second.train(resume_from_checkpoint=True).finished
    assert same(adapter(second), adapter(straight))
    assert differences(tmp_path / "parts", tmp_path / "straight") == []
    moved = [name for name, value in adapter(second).items() if "experts" in name and "lora_B" in name and value.any()]
    assert len(moved) == 4
    checkpoint = tmp_path / "straight" / "checkpoint-2"
    load_weights(checkpoint, second.model)  # as the best of a run is loaded
    assert not same(adapter(second), adapter(straight))
    theirs = PeftModel.from_pretrained(plain_gpt_oss(folder), str(checkpoint)).eval()
    with torch.no_grad():
        wanted, got = (model(input_ids=IDS).logits for model in (theirs, second.model.eval()))
        assert (got - wanted).abs().max() < 1e-4


def test_lora_that_peft_put_on_parameters_of_experts_is_trained_as_it_is(tmp_path: Path) -> None:
    parameters = ["1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj", "0.mlp.experts.down_proj"]
    theirs = get_peft_model(plain_gpt_oss(gpt_oss_folder(tmp_path / "base", experts=4)), LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=parameters))
    for name, value in theirs.named_parameters():
        if "lora_" in name:
            value.data.normal_(0, 0.1)
    with torch.no_grad():
        wanted = theirs.eval()(input_ids=IDS).logits
        ours = make(tmp_path / "run", by_letters, model=theirs).model.eval()
        assert (ours(input_ids=IDS).logits - wanted).abs().max() < 1e-4
    assert sum("lora_" in name for name, value in ours.named_parameters() if value.requires_grad) == 2 * (2 + 3)
