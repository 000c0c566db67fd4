"""Whole runs on a small random hybrid model: gated delta nets in most layers, their states in packed micro-batches."""

from pathlib import Path
from typing import Any

import pytest
from families import saved_family
from trainer_runs import adapter, by_letters, largest_ratio_error, make, relative, same

from lowmem_grpo import FastLanguageModel, GRPOTrainer
from tests.attacks.small_run import StopAt, differences

MODES = (False, True, "offload")  # of gradient checkpointing
NEAR = 1e-4  # of ratios before the first update, and of adapters after three


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model lies."""
    return saved_family("qwen3_5_text", tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    """Three steps without a stop, with layer inputs on the host."""
    trainer = trainer_on(folder, tmp_path_factory.mktemp("straight"), "offload", save_strategy="steps", save_steps=1)
    trainer.train()
    return trainer


def trainer_on(
    folder: Path, out: Path, checkpointing: bool | str, four_bit: bool = False, **settings: Any
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
