"""Runs on a published model: float16 with its loss scale, a run that stops and goes on, and a recipe on GSM8K."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from published_model import published_model

from lowmem_grpo import FastLanguageModel, SFTConfig, SFTTrainer
from lowmem_grpo.__main__ import main
from lowmem_grpo.recipes import gsm8k
from lowmem_grpo.rewards.texts import completion_texts
from lowmem_grpo.runs.records import read_lines
from tests.attacks.small_run import StopAt, differences, make

pytestmark = pytest.mark.slow
GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl"


@pytest.fixture(scope="module")
def folder() -> str:
    return str(published_model().folder)


def adapted(folder: str, dtype: torch.dtype, **lora: Any) -> Any:
    bare, _ = FastLanguageModel.from_pretrained(folder, max_seq_length=256, dtype=dtype, load_in_16bit=True)
    return FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False,
                                            target_modules=["q_proj", "v_proj", "down_proj"], **lora)


def test_fine_tuning_in_float16_finds_its_loss_scale_and_lowers_the_loss(
    folder: str, tmp_path: Path
) -> None:
    rows = [{"prompt": [{"role": "user", "content": "Name three rivers."}],
             "completion": [{"role": "assistant", "content": "The Nile, the Rhine and the Danube."}]}] * 4
    settings = SFTConfig(str(tmp_path), per_device_train_batch_size=1, max_steps=4, learning_rate=2e-3,
                         lr_scheduler_type="constant", logging_steps=1, save_strategy="no", disable_tqdm=True)
    trainer = SFTTrainer(adapted(folder, torch.float16), rows, settings)
    scale = trainer.learner.scaler.get_scale()
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.3
    assert scale / 4 <= trainer.learner.scaler.get_scale()  # halved at most twice, at the start


def vowels(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in text)) for text in completion_texts(completions)]


def test_a_run_that_stops_after_two_steps_and_goes_on_is_the_undisturbed_one(folder: str, tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("Name a river.", "Say hello.")]

    def trainer(name: str, *callbacks: Any) -> Any:
        model = adapted(folder, torch.float32, lora_dropout=0.1)
        return make(tmp_path / name, vowels, rows, callbacks, model=model,
                    num_generations=2, per_device_train_batch_size=2, max_completion_length=6, max_steps=4,
                    learning_rate=1e-3)

    trainer("whole").train()
    trainer("parts", StopAt(2)).train()
    assert trainer("parts").train(resume_from_checkpoint=True).finished
    assert differences(tmp_path / "parts", tmp_path / "whole") == []
    assert any(line.get("grad_norm") for line in read_lines(tmp_path / "whole" / "metrics.jsonl")[2:])


def test_two_steps_of_gsm8k_on_a_published_model(folder: str, tmp_path: Path) -> None:
    """On the data set itself, where it is there."""
    data = tmp_path / "rows.jsonl"
    rows = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(8)]
    data.write_text(GSM8K.read_text() if GSM8K.exists() else "".join(json.dumps(row) + "\n" for row in rows))
    words = ["run", "gsm8k", f"model={folder}", f"dataset={data}", f"output_dir={tmp_path / 'run'}", "max_steps=2",
             "num_generations=2", "per_device_train_batch_size=2", "gradient_accumulation_steps=1",
             "max_completion_length=24", "max_seq_length=512", "load_in_4bit=false", "optim=adamw_torch"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["recipe"], summary["status"], summary["steps"]) == ("gsm8k", "finished", 2)
    metrics, said = (read_lines(tmp_path / "run" / f"{name}.jsonl") for name in ("metrics", "completions"))
    assert {f"rewards/{function.__name__}/mean" for function in gsm8k.REWARDS} <= metrics[0].keys()
    questions = [json.loads(line)["question"] for line in data.read_text().splitlines()]
    assert len(said) == 4
    for line in said:
        assert gsm8k.SYSTEM_PROMPT.strip() in line["prompt"]
        assert line["prompt"].startswith("[system]\n")
        assert any(question in line["prompt"] for question in questions)
