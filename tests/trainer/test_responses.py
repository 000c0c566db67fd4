"""Only the answers of a text are trained, and who looks at `train_dataset` sees which."""

from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo import FastLanguageModel, SFTConfig, SFTTrainer
from lowmem_grpo.chat_templates import get_chat_template, train_on_responses_only
from lowmem_grpo.trainer.responses import parts_of

PARTS = {"instruction_part": "<|im_start|>user\n", "response_part": "<|im_start|>assistant\n"}
CHAT = [{"role": "user", "content": "Add 1 and 2."}, {"role": "assistant", "content": "3"},
        {"role": "user", "content": "Add 4."}, {"role": "assistant", "content": "7"}]


def trainer_of(tmp_path: Path, rows: Any = None, **options: Any) -> Any:
    model, tokenizer = FastLanguageModel.from_pretrained("tiny", max_seq_length=256, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(model, r=4)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    return SFTTrainer(
        model=model, tokenizer=tokenizer, train_dataset=rows or [{"text": text}] * 4,
        args=SFTConfig(**{"output_dir": str(tmp_path), "max_steps": 1, "per_device_train_batch_size": 2,
                          "learning_rate": 1e-3} | options.pop("settings", {})),
        **options,
    )


def trained_text(trainer: Any, index: int = 0) -> str:
    """What a notebook prints: the labels that are not -100."""
    row = trainer.train_dataset[index]
    assert len(row["labels"]) == len(row["input_ids"])
    return str(trainer.tokenizer.decode([token for token in row["labels"] if token != -100]))


@pytest.mark.parametrize(("options", "wanted"), [
    (PARTS, ["3<|im_end|>", "7<|im_end|>"]), ({}, ["3<|im_end|>", "7<|im_end|>"]),
    (PARTS | {"last_response_only": True, "num_proc": 2}, ["7<|im_end|>"]),
])
def test_the_answers_are_trained_and_nothing_else(options: dict[str, Any], wanted: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    assert "Add 4." in trained_text(trainer)
    assert train_on_responses_only(trainer, **options) is trainer
    assert trained_text(trainer).split() == wanted
    assert trainer.train().finished


def test_the_steps_of_an_epoch_are_counted_without_the_rows_that_have_no_answer(tmp_path: Path) -> None:
    asked = "<|im_start|>user\nAdd 1 and 2.<|im_end|>\n"
    rows = [{"text": f"{asked}<|im_start|>assistant\n3<|im_end|>"}] * 3 + [{"text": asked}] * 3
    trainer = trainer_of(tmp_path, rows, settings={"max_steps": -1, "num_train_epochs": 2, "warmup_steps": 1})
    assert trainer.state.max_steps == 6
    assert train_on_responses_only(trainer, **PARTS).state.max_steps == 4  # 3 rows are left, as TRL would have filtered
    trainer.train()
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    assert rates == pytest.approx([0, 1e-3, 1e-3 * 2 / 3, 1e-3 / 3]) and trainer.state.epoch == 2


def test_the_evaluation_counts_the_answers_only(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    rows = [{"text": trainer.tokenizer.apply_chat_template(CHAT, tokenize=False)}]
    evaluated = trainer_of(tmp_path / "second", eval_dataset=rows)
    before = evaluated.evaluate()["eval_loss"]
    train_on_responses_only(evaluated, **PARTS)
    assert evaluated.evaluate()["eval_loss"] != pytest.approx(before)


@pytest.mark.parametrize(("rows", "options", "message"), [
    (None, PARTS | {"response_part": "### Response:"}, r"none of the first 4 rows .* response_part='###"),
    ([{"text": "no markers at all"}], PARTS, "The first row is 'no markers at all"),
    (None, PARTS | {"return_function": True}, "return_function=True is not supported"),
])
def test_rows_without_an_answer_are_named_before_training(
    rows: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train_on_responses_only(trainer_of(tmp_path, rows), **options)


def test_another_trainer_is_refused() -> None:
    with pytest.raises(ValueError, match="takes an SFTTrainer; got a str"):
        train_on_responses_only("trainer")  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "instruction", "response"), [
    ("gemma-3", "<start_of_turn>user\n", "<start_of_turn>model\n"), ("chatml", *PARTS.values()),
    ("llama-3.1", "<|start_header_id|>user<|end_header_id|>\n\n", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
])
def test_the_parts_are_read_off_the_chat_template(name: str, instruction: str, response: str) -> None:
    _, tokenizer = FastLanguageModel.from_pretrained("tiny", load_in_4bit=False)
    tokenizer.chat_template = None
    found = parts_of(get_chat_template(tokenizer, name))
    assert (found[0].endswith(instruction), found[1]) == (True, response)
    assert len(found[0]) - len(instruction) < 3
