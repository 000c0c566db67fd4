"""A user's compute_metrics gets the predictions and labels that transformers' Trainer would give it."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from small_models import TINY
from transformers import AutoModelForCausalLM, AutoTokenizer, EvalPrediction

from lowmem_grpo import (
    DPOConfig,
    DPOTrainer,
    FastLanguageModel,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    ORPOConfig,
    ORPOTrainer,
    SFTConfig,
    SFTTrainer,
)
from lowmem_grpo.trainer.offline import numbers_of

ROWS = [{"prompt": "1 + 1 =", "completion": " 2"}, {"prompt": "Start with 12. Add 30.", "completion": " 42, I think"}]


def trainer_of(folder: Path, **parts: Any) -> SFTTrainer:
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False, device="cpu")
    model = FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False)
    config = SFTConfig(output_dir=str(folder), max_steps=1, per_device_train_batch_size=2, disable_tqdm=True,
                       **parts.pop("settings", {}))
    return SFTTrainer(model, train_dataset=ROWS, eval_dataset=ROWS, args=config, **parts)


def test_predictions_and_labels_are_those_of_plain_transformers(tmp_path: Path) -> None:
    """A fresh adapter changes nothing, so the logits are the base model's."""
    seen: list[EvalPrediction] = []

    def compute(given: EvalPrediction) -> dict[str, float]:
        seen.append(given)
        return {"my_metric": 0.125, "eval_named": 2.0}

    found = trainer_of(tmp_path, compute_metrics=compute).evaluate()
    assert (found["eval_my_metric"], found["eval_named"]) == (0.125, 2.0) and found["eval_loss"] > 0
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(TINY).eval(), AutoTokenizer.from_pretrained(TINY)
    (given,) = seen
    for row, logits, labels in zip(ROWS, given.predictions, given.label_ids, strict=True):
        prompt = tokenizer(row["prompt"], add_special_tokens=False).input_ids
        ids = [*prompt, *tokenizer(row["completion"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        with torch.no_grad():
            wanted = plain(torch.tensor([ids])).logits[0].numpy()
        numpy.testing.assert_allclose(logits[: len(ids)], wanted, atol=1e-4)
        assert labels[: len(ids)].tolist() == [-100] * len(prompt) + ids[len(prompt) :]
        assert (labels[len(ids) :] == -100).all() and (logits[len(ids) :] == -100).all()


@pytest.mark.parametrize(("trainer", "config"), [
    (DPOTrainer, DPOConfig), (KTOTrainer, KTOConfig), (ORPOTrainer, ORPOConfig)])
def test_of_pairs_each_side_is_a_row_of_predictions(trainer: Any, config: Any, tmp_path: Path) -> None:
    seen: list[EvalPrediction] = []
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " No"} for row in ROWS]
    args = config(output_dir=str(tmp_path), per_device_train_batch_size=2, max_length=128, disable_tqdm=True)
    made = trainer("tiny", args=args, train_dataset=pairs, eval_dataset=pairs,
                   compute_metrics=lambda given: seen.append(given) or {"mine": 0.5})
    assert made.evaluate()["eval_mine"] == 0.5
    (given,) = seen
    said = [made.tokenizer.decode([token for token in labels if token != -100]) for labels in given.label_ids]
    sides = [row[side] for row in pairs for side in ("chosen", "rejected")]
    wanted = [sides[place] for place in ((0, 2, 1, 3) if trainer is KTOTrainer else range(4))]
    assert given.predictions.shape[:2] == given.label_ids.shape
    assert all(side in text for text, side in zip(said, wanted, strict=True))


def test_a_side_is_read_behind_the_other_sides_prompt(tmp_path: Path) -> None:
    """Its first letters join the prompt's only token, so each side has another first token."""
    seen: list[EvalPrediction] = []
    row = {"prompt": "St", "chosen": "art with 3", "rejected": "op it"}
    args = DPOConfig(output_dir=str(tmp_path), max_length=128, disable_tqdm=True)
    made = DPOTrainer("tiny", args=args, train_dataset=[row] * 2, eval_dataset=[row],
                      compute_metrics=lambda given: seen.append(given) or {"mine": 0.5})
    made.evaluate()
    (given,) = seen
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(TINY).eval(), AutoTokenizer.from_pretrained(TINY)
    for logits, side in zip(given.predictions, ("chosen", "rejected"), strict=True):
        ids = [*tokenizer(row["prompt"] + row[side], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        with torch.no_grad():
            wanted = plain(torch.tensor([ids])).logits[0].numpy()
        numpy.testing.assert_allclose(logits[: len(ids)], wanted, atol=1e-4)


def test_logits_may_become_ids_first_and_the_metric_decides_which_checkpoint_is_best(tmp_path: Path) -> None:
    def likely(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert logits.shape[:2] == labels.shape
        return logits.argmax(-1)

    def exact(given: EvalPrediction) -> dict[str, float]:
        assert given.predictions.shape == given.label_ids.shape  # ids, not logits
        right = (given.predictions[:, :-1] == given.label_ids[:, 1:])[given.label_ids[:, 1:] != -100]
        return {"exact": float(right.mean())}

    trainer = trainer_of(tmp_path, compute_metrics=exact, preprocess_logits_for_metrics=likely, settings={
        "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True,
        "metric_for_best_model": "exact", "greater_is_better": True})
    trainer.train()
    measured = trainer.state.log_history[-2]
    assert measured["eval_exact"] == pytest.approx(measured["eval_mean_token_accuracy"])
    assert trainer.state.best_metric == measured["eval_exact"]


def test_grpo_says_where_to_compute_metrics_of_completions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"compute_metrics .* SFTTrainer, .* take it; of sampled completions"):
        GRPOTrainer("tiny", len, GRPOConfig(output_dir=str(tmp_path)), ROWS, compute_metrics=len)


@pytest.mark.parametrize(("returned", "said"), [
    (None, "it returned None"), ({"a": "0.5"}, "'a' is '0.5'"), ({"a": [1, 2]}, r"'a' is \[1, 2\]"),
    ({"a": torch.zeros(2)}, "'a' is tensor"),
])
def test_what_is_no_number_by_name_is_shown(returned: Any, said: str) -> None:
    with pytest.raises(TypeError, match=f"compute_metrics is to return a dict of numbers by name.*; {said}"):
        numbers_of(returned)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    assert numbers_of({"a": numpy.float32(0.5), "b": torch.tensor(2)}) == {"a": 0.5, "b": 2.0}


def test_a_preprocessing_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="preprocess_logits_for_metrics is given, and compute_metrics"):
        trainer_of(tmp_path, preprocess_logits_for_metrics=len)
