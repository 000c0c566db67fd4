"""Runs that stop and go on: by a callback, Ctrl-C or a damaged disk; tests/attacks/test_runs.py kills them."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from programs import program
from trainer_runs import adapter_of, load, same
from trainer_runs import make_dropping as make

from lowmem_grpo.__main__ import main
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.runs import checkpoint, checkpoint_state
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.runs.saved_adapter import CheckpointError, MismatchError
from lowmem_grpo.runs.state import Interrupt
from tests.attacks import small_run
from tests.attacks.small_run import ROWS, StopAt, differences, digit_sum, make_sft, records


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps without a stop."""
    folder = tmp_path_factory.mktemp("straight")
    make(folder).train()
    return folder


# Stops that were asked for


def test_a_resumed_run_is_the_undisturbed_one(tmp_path: Path, straight: Path) -> None:
    first = make(tmp_path, callbacks=[StopAt(3)])
    assert not first.train().finished
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["checkpoint-3"]
    second = make(tmp_path)
    output = second.train(resume_from_checkpoint=True)
    assert (output.global_step, output.finished) == (6, True)
    assert differences(tmp_path, straight) == []
    elapsed = [line["elapsed"] for line in read_lines(tmp_path / "metrics.jsonl")]
    assert elapsed == sorted(elapsed)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {"num_iterations": 2, "steps_per_generation": 2, "max_steps": 8}, {"optim": "adamw_8bit"},
    {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": ROWS[:2], "logging_steps": 2},
], ids=["old log-probabilities", "8-bit optimizer", "evaluation and a log line half done"])
def test_a_resumed_run_is_the_undisturbed_one_with(tmp_path: Path, settings: dict[str, Any]) -> None:
    make(tmp_path / "whole", **settings).train()
    make(tmp_path / "parts", callbacks=[StopAt(3)], **settings).train()
    assert make(tmp_path / "parts", **settings).train(resume_from_checkpoint=True).finished
    assert differences(tmp_path / "parts", tmp_path / "whole") == []


def test_resuming_a_run_without_a_checkpoint_starts_anew_and_drops_its_lines(
    tmp_path: Path, straight: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(straight / "metrics.jsonl", tmp_path)
    (tmp_path / "completions.jsonl").write_text('{"step": 1, "prompt": "half a li')
    make(tmp_path).train(resume_from_checkpoint=True)
    assert "has no checkpoint yet: starting from step 0" in caplog.text
    assert differences(tmp_path, straight) == []


def test_resuming_a_finished_run_trains_nothing(tmp_path: Path, straight: Path) -> None:
    folder = shutil.copytree(straight, tmp_path / "run")
    output = make(folder).train(resume_from_checkpoint=True)
    assert (output.global_step, output.finished) == (6, True)
    assert differences(folder, straight) == []


def test_other_settings_are_named_on_resume_and_other_data_refused(
    tmp_path: Path, straight: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(straight, tmp_path / "run")
    caplog.set_level(logging.WARNING)
    make(folder, max_steps=7, learning_rate=3e-3).train(resume_from_checkpoint=True)
    assert "learning_rate: 0.01 -> 0.003" in caplog.text
    assert "max_steps: 6 -> 7" in caplog.text
    assert "learning_rate of the run go on, as the optimizer's state holds them" in caplog.text
    for name, value in (("lora_alpha", 32), ("use_rslora", True)):
        with pytest.raises(MismatchError, match=f"{name} is .* in the checkpoint, {value} in the model, which scales"):
            small_run.make(folder, model=load(**{name: value})).train(resume_from_checkpoint=True)
    with pytest.raises(DataError, match="dataset of 7 rows, this one has 6"):
        make(folder, rows=ROWS[:6]).train(resume_from_checkpoint=True)


def test_a_resume_on_another_base_model_of_equal_shapes_is_refused_or_said(
    tmp_path: Path, straight: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = shutil.copytree(straight, tmp_path / "run"), load()
    name = other.loaded.name
    small_run.make(folder, model=other).train(resume_from_checkpoint=True)
    assert "other weights" not in caplog.text
    for layer in other.get_base_model().model.layers:
        layer.mlp.down_proj.base_layer.weight.data += 0.1  # as a merged adapter changes them
    other.peft_config["default"].base_model_name_or_path, trained = "meta/other", adapter_of(other)
    with pytest.raises(MismatchError, match=f"was trained on {name}, and this model is meta/other, with other weights"):
        small_run.make(folder, model=other).train(resume_from_checkpoint=True)
    assert same(adapter_of(other), trained)
    with monkeypatch.context() as patch:  # a renamed folder, loaded in another precision
        patch.setattr(checkpoint_state, "base_digest", lambda model: "torch.bfloat16 0 0")
        small_run.make(folder, model=other).train(resume_from_checkpoint=True)
    assert "or on the same in another precision" in caplog.text
    other.peft_config["default"].base_model_name_or_path = None
    small_run.make(folder, model=other).train(resume_from_checkpoint=True)
    assert f"was trained on other weights of {name} than this model has" in caplog.text


def test_another_number_of_threads_than_the_run_had_is_said_on_resume(
    tmp_path: Path, straight: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, had = shutil.copytree(straight, tmp_path / "run"), torch.get_num_threads()
    make(folder).train(resume_from_checkpoint=True)
    assert "OMP_NUM_THREADS" not in caplog.text
    monkeypatch.setattr(torch, "get_num_threads", lambda: had + 1)
    make(folder).train(resume_from_checkpoint=True)
    assert f"computed with OMP_NUM_THREADS={had} and goes on with {had + 1}" in caplog.text


# Fine-tuning


def test_resumed_fine_tuning_is_the_undisturbed_one(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    make_sft(whole, model=load(lora_dropout=0.1)).train()
    make_sft(parts, [StopAt(3)], load(lora_dropout=0.1)).train()
    assert [path.name for path in checkpoint.list_checkpoints(parts)] == ["checkpoint-2", "checkpoint-3"]
    shutil.rmtree(parts / "checkpoint-3")  # so step 3 is made again
    assert make_sft(parts, model=load(lora_dropout=0.1)).train(resume_from_checkpoint=True).global_step == 6
    assert differences(parts, whole) == []
    assert [path.name for path in checkpoint.list_checkpoints(parts)] == ["checkpoint-4", "checkpoint-6"]


# Ctrl-C


@pytest.mark.slow
def test_ctrl_c_finishes_and_saves_the_step_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [
        "run", "arithmetic", f"output_dir={run}", "per_device_train_batch_size=16", "gradient_accumulation_steps=1",
        "num_generations=8", "save_steps=10000", "max_completion_length=32", "eval_problems=4", "train_size=16",
    ]
    command = [sys.executable, "-c", "from lowmem_grpo.__main__ import main; main()"]
    with program(*command, *words, "max_steps=10000", stderr=subprocess.STDOUT) as process:
        while not (run / "metrics.jsonl").exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate()
    assert process.returncode == 130, said
    steps = [line["step"] for line in records(run)[0]]
    assert steps == list(range(1, len(steps) + 1)) and steps
    assert "finishing this step" in said
    assert f"stopped at step {steps[-1]}" in said
    assert "resume" in said
    assert [path.name for path in checkpoint.list_checkpoints(run)] == [f"checkpoint-{steps[-1]}"]
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    last = len(steps) + 2
    second = CliRunner().invoke(main, [*words, f"max_steps={last}", "resume=true"])
    assert second.exit_code == 0, second.output
    assert [line["step"] for line in records(run)[0]] == list(range(1, last + 1))
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handled, over, scored, on_signal = threading.Event(), threading.Event(), list[list[str]](), Interrupt.on_signal

    def noted(interrupt: Interrupt, *given: Any) -> None:
        on_signal(interrupt, *given)
        handled.set()

    def impatient(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        if not trainer_state.global_step:
            return digit_sum(completions)
        os.kill(os.getpid(), signal.SIGINT)
        assert handled.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        over.wait(60)
        scored.append(completions)
        return digit_sum(completions)

    monkeypatch.setattr(Interrupt, "on_signal", noted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, impatient).train()
    assert handled.is_set() and not scored, "nobody waited for the rewards"
    over.set()
    assert signal.getsignal(signal.SIGINT) is before
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    assert not [*tmp_path.glob("checkpoint-*")], "as the first Ctrl-C said"


# Checkpoints


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def test_a_truncated_checkpoint_is_named_and_passed_over(
    tmp_path: Path, straight: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, save_steps=2, callbacks=[StopAt(5)]).train()
    truncate(tmp_path / "checkpoint-5" / "optimizer.safetensors")
    make(tmp_path).train(resume_from_checkpoint=True)
    assert f"passed over: {tmp_path / 'checkpoint-5' / 'optimizer.safetensors'} is truncated" in caplog.text
    assert differences(tmp_path, straight) == []


def test_a_damaged_checkpoint_asked_for_by_name_is_refused(tmp_path: Path, straight: Path) -> None:
    folder = shutil.copytree(straight, tmp_path / "run")
    before = (folder / "metrics.jsonl").read_bytes()
    truncate(folder / "checkpoint-6" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is truncated"):
        make(folder).train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    with pytest.raises(CheckpointError, match="is not a folder"):
        make(folder).train(resume_from_checkpoint=str(folder / "checkpoint-7"))
    with pytest.raises(CheckpointError, match="take adapter or checkpoint-6, which it holds"):
        make(folder).train(resume_from_checkpoint=str(folder))
    assert (folder / "metrics.jsonl").read_bytes() == before


def by_step(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
    """The best mean reward is that of the second step."""
    mean = {0: 1.0, 1: 9.0}.get(trainer_state.global_step, 2.0)
    return [mean + 0.1 * (index % 2) for index in range(len(completions))]


def test_the_best_checkpoint_and_the_last_ones_are_kept(tmp_path: Path) -> None:
    trainer = make(tmp_path, by_step, save_steps=1, save_total_limit=2)
    trainer.train()
    names = [path.name for path in checkpoint.list_checkpoints(tmp_path)]
    assert names == ["checkpoint-2", "checkpoint-5", "checkpoint-6"]
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
    assert json.loads((tmp_path / "summary.json").read_text())["best_checkpoint"] == str(tmp_path / "checkpoint-2")


@pytest.mark.slow
def test_the_best_checkpoint_is_chosen_by_the_steps_since_the_last_save(tmp_path: Path) -> None:
    """With several optimizer steps a rollout, one line of metrics stands for all of them."""
    trainer = make(tmp_path, by_step, save_steps=2, num_iterations=2, save_total_limit=1, max_steps=8)
    trainer.train()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-8"]


@pytest.mark.slow
def test_a_resumed_run_keeps_the_best_checkpoint_although_it_was_moved(tmp_path: Path) -> None:
    make(tmp_path / "here", by_step, save_steps=1, save_total_limit=1, callbacks=[StopAt(3)]).train()
    there = shutil.move(tmp_path / "here", tmp_path / "there")
    make(there, by_step, save_steps=1, save_total_limit=1).train(resume_from_checkpoint=True)
    assert [path.name for path in checkpoint.list_checkpoints(there)] == ["checkpoint-2", "checkpoint-6"]
