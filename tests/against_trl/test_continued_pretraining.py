"""Continued pretraining as Unsloth's notebooks do it, on texts and then on instructions, is that of TRL 1.16."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
from datasets import Dataset
from small_models import TINY, random_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_grpo import FastLanguageModel, UnslothTrainer, UnslothTrainingArguments

TEXTS = ["Once upon a time, 3 + 4 was 7.", "9", "A fox met a hen, and a hen a fox.", "Start. Add. Stop!"]
ANSWERS = [f"### Instruction:\nAdd {n}.\n\n### Response:\n{n + n}" for n in (3, 40, 500, 7)]
PARTS: list[tuple[list[str], dict[str, Any]]] = [  # all rows are one step, so their order does not matter
    (TEXTS, {"lr_scheduler_type": "cosine", "max_steps": 4, "warmup_steps": 1}),
    (ANSWERS, {"lr_scheduler_type": "linear", "max_steps": 3, "warmup_steps": 2}),
]
SETTINGS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 2e-3,
            "logging_steps": 1, "optim": "adamw_torch", "weight_decay": 0.0, "seed": 3407, "report_to": "none"}
RATE = 4e-4  # of embedding and head
LORA = {"r": 4, "lora_alpha": 32, "use_rslora": True}
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def trained(model: Any) -> dict[str, Any]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_two_trainings_with_embedding_and_head_have_trls_losses_and_values(tied: bool, tmp_path: Path) -> None:
    random_model("Llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.save_pretrained(tmp_path / "base")
    bare, _ = FastLanguageModel.from_pretrained(str(tmp_path / "base"), max_seq_length=64, load_in_4bit=False)
    ours: Any = FastLanguageModel.get_peft_model(
        bare, target_modules=[*LAYERS, "embed_tokens", "lm_head"], use_gradient_checkpointing="unsloth", **LORA)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), peft.LoraConfig(
        target_modules=LAYERS, modules_to_save=["embed_tokens", "lm_head"], ensure_weight_tying=tied,
        task_type="CAUSAL_LM", **LORA))
    begun = {name: each.detach().clone() for name, each in trained(ours).items()}
    with torch.no_grad():
        for name, each in trained(theirs).items():
            each.copy_(begun[name])
    for number, (texts, schedule) in enumerate(PARTS):
        rows = Dataset.from_dict({"text": [text + tokenizer.eos_token for text in texts]})
        mine = UnslothTrainer(
            model=ours, tokenizer=tokenizer, train_dataset=rows, dataset_text_field="text", max_seq_length=64,
            dataset_num_proc=8, args=UnslothTrainingArguments(
                output_dir=str(tmp_path / f"ours{number}"), embedding_learning_rate=RATE, **SETTINGS, **schedule))
        groups = [{"params": [each for name, each in trained(theirs).items() if ("lora_" in name) is of_lora],
                   "lr": rate} for of_lora, rate in ((True, SETTINGS["learning_rate"]), (False, RATE))]
        other = trl.SFTTrainer(
            theirs, trl.SFTConfig(str(tmp_path / f"trl{number}"), use_cpu=True, bf16=False, max_length=64,
                                  gradient_checkpointing=False, **SETTINGS, **schedule),
            train_dataset=rows, processing_class=tokenizer,
            optimizers=(torch.optim.AdamW(groups, weight_decay=0.0), None))
        mine.train()
        other.train()
        losses = [[line["loss"] for line in each.state.log_history if "loss" in line] for each in (mine, other)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5) and len(losses[0]) == schedule["max_steps"]
        moved = {name: each.detach() - begun[name] for name, each in trained(theirs).items()}
        assert all(change.any() for change in moved.values())
        for name, each in trained(ours).items():
            assert (each.detach() - begun[name] - moved[name]).abs().max() < 1e-3 * moved[name].abs().max(), name
