"""A whole run on a small random mixture of experts: what is sampled is trained on its own experts."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import mixture_folder
from trainer_runs import adapter, by_letters, largest_ratio_error, make, same

from lowmem_grpo import FastLanguageModel, GRPOTrainer
from lowmem_grpo.models.routes import Replay


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture_folder(tmp_path_factory.mktemp("mixture"))


def trainer_on(folder: Path, out: Path, four_bit: bool = True, engine: Any = False, **settings: Any) -> GRPOTrainer:
    model, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=128, load_in_4bit=four_bit,
                                                 fast_inference=engine)
    model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing="offload")
    return make(out, by_letters, model=model, **settings)


def test_before_the_first_update_every_ratio_is_one_and_a_run_learns(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_on(folder, tmp_path, max_steps=3, num_iterations=2, beta=0.02, parity_steps=1)
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
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, seen = trainer_on(folder, tmp_path, max_steps=1, num_iterations=2, beta=0.02), []
    chosen = Replay.chosen

    def watched(self: Replay, layer: int, live: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), layer in self.differing))
        return chosen(self, layer, live)

    monkeypatch.setattr(Replay, "chosen", watched)
    trainer.train()
    assert {(False, False), (True, False), (True, True)} == set(seen)  # without gradient, with it, and run again


def test_rollouts_without_routes_train_on_live_ones_and_one_line_says_so(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_on(folder, tmp_path, four_bit=False)
    for _ in range(2):
        groups = trainer.rollout()
        for rollout in groups[0].rollouts:
            rollout.routes = None
        with caplog.at_level(logging.WARNING):
            metrics = trainer.update(groups)
    assert "sampling/routes/differing" in metrics
    said = [record.message for record in caplog.records if "without routes" in record.message]
    assert len(said) == 1 and "4 of 8 completions" in said[0]
