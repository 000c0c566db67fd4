"""Whole runs on small random models of two kinds: hybrids, with gated delta nets in most layers and their states in
packed micro-batches, and mixtures, whose rollouts are trained on their own experts."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from families import saved_family
from mixtures import mixture_folder
from trainer_runs import ROWS, SMALL, adapter, by_letters, largest_ratio_error, make, relative, same

from lowmem_grpo import FastLanguageModel, GRPOTrainer, SDFTConfig, SDFTTrainer
from lowmem_grpo.models.routes import Replay
from tests.attacks.small_run import StopAt, differences

MODES = (False, True, "offload")  # of gradient checkpointing
NEAR = 1e-4  # of ratios before the first update, and of adapters after three


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model lies."""
    return saved_family("qwen3_5_text", tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture_folder(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    """Three steps without a stop, with layer inputs on the host."""
    trainer = trainer_on(folder, tmp_path_factory.mktemp("straight"), "offload", save_strategy="steps", save_steps=1)
    trainer.train()
    return trainer


def trainer_on(
    folder: Path, out: Path, checkpointing: bool | str = "offload", four_bit: bool = False, **settings: Any
) -> GRPOTrainer:
    """A run of three steps, each of two groups that share a prompt, and each used twice."""
    model, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=128, load_in_4bit=four_bit)
    model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=checkpointing)
    return make(out, by_letters, model=model, **({"max_steps": 3, "num_iterations": 2, "beta": 0.02} | settings))


@pytest.mark.slow
@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("checkpointing", MODES)
def test_every_ratio_is_one_before_the_first_update_and_a_run_learns(
    checkpointing: bool | str, four_bit: bool, folder: Path, tmp_path: Path
) -> None:
    trainer = trainer_on(folder, tmp_path, checkpointing, four_bit, parity_steps=1)
    before, groups = adapter(trainer), trainer.rollout()
    assert largest_ratio_error(trainer, groups) <= NEAR
    output = trainer.train()
    assert output.finished and not same(before, adapter(trainer))
    logs = [line for line in trainer.state.log_history if "grad_norm" in line]
    assert logs and all(line["grad_norm"] > 0 and line["kl"] >= 0 for line in logs)
    assert all(line["sampling/parity/max"] <= NEAR for line in logs if "sampling/parity/max" in line)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", MODES[:2])
def test_where_layer_inputs_lie_does_not_change_what_is_learned(
    checkpointing: bool | str, folder: Path, straight: GRPOTrainer, tmp_path: Path
) -> None:
    trainer = trainer_on(folder, tmp_path, checkpointing)
    trainer.train()
    assert relative(adapter(trainer), adapter(straight)) <= NEAR


@pytest.mark.slow
def test_a_run_that_stopped_and_went_on_is_the_undisturbed_one(
    folder: Path, straight: GRPOTrainer, tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1}
    first = trainer_on(folder, tmp_path, "offload", callbacks=[StopAt(2)], **saving)
    assert not first.train().finished
    second = trainer_on(folder, tmp_path, "offload", **saving)
    assert second.train(resume_from_checkpoint=True).finished
    assert same(adapter(second), adapter(straight))
    assert differences(tmp_path, Path(straight.args.output_dir)) == []


# Mixtures


def test_before_the_first_update_every_ratio_is_one_and_a_run_learns(mixture: Path, tmp_path: Path) -> None:
    trainer = trainer_on(mixture, tmp_path, four_bit=True, parity_steps=1)
    before = adapter(trainer)
    groups = trainer.rollout()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert all(len(one.routes) for one in rollouts)
    assert largest_ratio_error(trainer, groups) <= 1e-4
    assert trainer.update(groups, 1)["sampling/routes/differing"] <= 0.001  # one model on one machine
    trainer.train()
    assert not same(before, adapter(trainer))
    logs = [line for line in trainer.state.log_history[:-1] if "sampling/routes/differing" in line]
    assert logs and all(0 < line["sampling/routes/differing"] < 0.5 for line in logs)
    assert all(line["sampling/parity/max"] <= 1e-4 for line in logs if "sampling/parity/max" in line)
    assert all(line["kl"] >= 0 and line["grad_norm"] > 0 for line in logs)


def test_what_is_replayed_are_the_routes_of_the_rollouts_in_every_pass(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, seen = trainer_on(mixture, tmp_path, four_bit=True, max_steps=1), []
    chosen = Replay.chosen

    def watched(self: Replay, layer: int, live: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), layer in self.differing))
        return chosen(self, layer, live)

    monkeypatch.setattr(Replay, "chosen", watched)
    trainer.train()
    assert {(False, False), (True, False), (True, True)} == set(seen)  # without gradient, with it, and run again


def test_rollouts_without_routes_train_on_live_ones_and_one_line_says_so(
    mixture: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_on(mixture, tmp_path, num_iterations=1, beta=0.0)
    for _ in range(2):
        groups = trainer.rollout()
        for rollout in groups[0].rollouts:
            rollout.routes = None
        with caplog.at_level(logging.WARNING):
            metrics = trainer.update(groups)
    assert "sampling/routes/differing" in metrics
    said = [record.message for record in caplog.records if "without routes" in record.message]
    assert len(said) == 1 and "4 of 8 completions" in said[0]


def test_routes_behind_the_teachers_prompt_would_be_replayed_behind_the_students(mixture: Path, tmp_path: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(mixture), max_seq_length=128, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(model, r=4)
    config = SDFTConfig(output_dir=str(tmp_path), generate_from_teacher=True, distillation_topk=7, **SMALL)
    trainer = SDFTTrainer(model, config, [row | {"privileged_context": "It is 14."} for row in ROWS])
    groups = trainer.rollout()
    assert all(len(rollout.teacher_prompt) > len(group.prompt_ids) for group in groups for rollout in group.rollouts)
    assert "sampling/routes/differing" not in trainer.update(groups)
