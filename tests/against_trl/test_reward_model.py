"""RewardTrainer beside TRL's: the loss, the metrics, and the gradients of LoRA and of the score head."""

import copy
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
from beside_trl import BASE, OURS, Record, Watcher, tokenizer
from datasets import Dataset
from small_models import scatter, shallow
from transformers import AutoModelForSequenceClassification

from lowmem_grpo import RewardConfig, RewardTrainer

SIDES = [("chosen", "rejected"), ("rejected", "chosen")]  # of a model that learnt nothing, some are ahead
TEXTS = [{"prompt": f"Start with {n}.", one: f" Add {n}: {2 * n}" + "." * n, other: f" Add {n}: {n}"}
         for n, (one, other) in enumerate(SIDES * 3, 1)]
WHOLE = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in TEXTS]
MARGINS = [row | {"margin": 0.5 * place} for place, row in enumerate(TEXTS)]
CHATS = [{side: [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
          for side in ("chosen", "rejected")} for row in TEXTS]
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "texts": (TEXTS, {}), "without a prompt": (WHOLE, {}), "chats": (CHATS, {}),
    "centred": (TEXTS, {"center_rewards_coefficient": 0.3}), "margins": (MARGINS, {}),
    "some too long": (TEXTS, {"max_length": 32}),
}
METRICS = ("loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward")


def classifier() -> Any:
    """A classifier with LoRA and a head that matter."""
    torch.manual_seed(5)
    with warnings.catch_warnings(action="ignore"):
        base = AutoModelForSequenceClassification.from_pretrained(shallow(), num_labels=1, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="SEQ_CLS")
    model = scatter(peft.get_peft_model(base, config), 0.1)
    return scatter(model, 0.02, of="score.modules_to_save")


def their_run(folder: Path, model: Any, rows: list[dict[str, Any]], evaluated: bool = False, **settings: Any) -> Record:
    record = Record()
    usual = {name: value for name, value in BASE.items() if name not in ("max_completion_length", "shuffle_dataset")}
    usual |= {"max_steps": 1, "train_sampling_strategy": "sequential", "per_device_train_batch_size": 6}
    trainer = trl.RewardTrainer(model, trl.RewardConfig(str(folder), **usual | settings),
                                train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
                                eval_dataset=Dataset.from_list(rows) if evaluated else None,
                                callbacks=[Watcher(record)])
    return record.of(trainer, None)


def our_run(folder: Path, model: Any, rows: list[dict[str, Any]], evaluated: bool = False, **settings: Any) -> Record:
    record = Record()
    usual = OURS | {"max_steps": 1, "per_device_train_batch_size": 6}
    trainer = RewardTrainer(model, RewardConfig(str(folder), **usual | settings), train_dataset=rows,
                            processing_class=tokenizer(), eval_dataset=rows if evaluated else None,
                            callbacks=[Watcher(record)])
    return record.of(trainer, None)


def assert_alike(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Gradients of a pair's sides nearly cancel where the sides are alike: their rounding is that of larger ones."""
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= 1e-5 * max(float(gradient.abs().max()), largest), name


@pytest.mark.parametrize("case", CASES)
def test_loss_metrics_and_gradients_are_those_of_trl(case: str, tmp_path: Path) -> None:
    rows, settings = CASES[case]
    model = classifier()
    theirs = their_run(tmp_path / "theirs", copy.deepcopy(model), rows, **settings)
    ours = our_run(tmp_path / "ours", copy.deepcopy(model), rows, **settings)
    (wanted,), (found,) = ([line for line in run.state.log_history if "loss" in line] for run in (theirs, ours))
    for name in METRICS:
        assert found[name] == pytest.approx(wanted[name], abs=1e-5), name
    assert ours.gradients.keys() == theirs.gradients.keys() and any("score" in name for name in ours.gradients)
    assert_alike(ours.gradients, theirs.gradients)


@pytest.mark.parametrize("cut", [{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
                                 {"max_tokens_per_micro_batch": 70}], ids=str)
def test_a_step_in_micro_batches_is_trls_step_in_one(cut: dict[str, Any], tmp_path: Path) -> None:
    model = classifier()
    theirs = their_run(tmp_path / "theirs", copy.deepcopy(model), MARGINS, center_rewards_coefficient=0.1)
    ours = our_run(tmp_path / "ours", copy.deepcopy(model), MARGINS, center_rewards_coefficient=0.1, **cut)
    (wanted,), (found,) = ([line for line in run.state.log_history if "loss" in line] for run in (theirs, ours))
    assert {name: found[name] for name in METRICS} == pytest.approx({name: wanted[name] for name in METRICS}, abs=1e-5)
    assert_alike(ours.gradients, theirs.gradients)


def test_steps_and_evaluations_are_those_of_trl(tmp_path: Path) -> None:
    model = classifier()
    settings = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "per_device_train_batch_size": 2}
    theirs = their_run(tmp_path / "theirs", copy.deepcopy(model), TEXTS, True, per_device_eval_batch_size=6, **settings)
    ours = our_run(tmp_path / "ours", copy.deepcopy(model), TEXTS, True, lr_scheduler_type="linear", **settings)
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5)
    (wanted,), (found,) = ([line for line in run.state.log_history if "eval_loss" in line] for run in (theirs, ours))
    names = [f"eval_{name}" for name in METRICS]
    assert {name: found[name] for name in names} == pytest.approx({name: wanted[name] for name in names}, abs=1e-4)
