"""Runs that stop and go on: by a callback, Ctrl-C, SIGKILL or a damaged disk."""

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import ROWS, StopAt, digit_sum, make, records
from safetensors.torch import load_file

from lowmem_grpo import FastLanguageModel, SFTConfig, SFTTrainer
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.runs import checkpoint
from lowmem_grpo.runs.checkpoint import CheckpointError
from lowmem_grpo.runs.records import read_lines

TAUGHT: dict[str, Any] = {
    "per_device_train_batch_size": 2, "max_steps": 6, "learning_rate": 1e-2, "lr_scheduler_type": "cosine",
    "save_steps": 2, "save_total_limit": 2, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3,
}
KILLS = 10
KILLED: dict[str, Any] = {"max_steps": 16, "save_steps": 1, "save_total_limit": 3}
CHILD = """
import sys
import torch
from test_resume import KILLED, make
torch.set_num_threads(1)
trainer = make(sys.argv[1], **KILLED)
print("ready", flush=True)
if sys.stdin.readline():
    trainer.train(resume_from_checkpoint=True)
"""


def check_same_run(folder: Path, expected: Path) -> None:
    """Adapters bit for bit, and every record once."""
    adapters = [load_file(path / "adapter" / "adapter_model.safetensors") for path in (folder, expected)]
    assert adapters[0].keys() == adapters[1].keys()
    for name, tensor in adapters[0].items():
        assert torch.equal(tensor, adapters[1][name]), name
    metrics, completions = records(folder)
    assert [line["step"] for line in metrics] == list(range(1, metrics[-1]["step"] + 1))
    assert (metrics, completions) == records(expected)


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
    check_same_run(tmp_path, straight)
    elapsed = [line["elapsed"] for line in read_lines(tmp_path / "metrics.jsonl")]
    assert elapsed == sorted(elapsed)


@pytest.mark.parametrize("settings", [
    {"num_iterations": 2, "steps_per_generation": 2, "max_steps": 8}, {"optim": "adamw_8bit"},
    {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": ROWS[:2], "logging_steps": 2},
], ids=["old log-probabilities", "8-bit optimizer", "evaluation and a log line half done"])
def test_a_resumed_run_is_the_undisturbed_one_with(tmp_path: Path, settings: dict[str, Any]) -> None:
    make(tmp_path / "whole", **settings).train()
    make(tmp_path / "parts", callbacks=[StopAt(3)], **settings).train()
    assert make(tmp_path / "parts", **settings).train(resume_from_checkpoint=True).finished
    adapters = [load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert records(tmp_path / "parts") == records(tmp_path / "whole")


def test_steps_recorded_after_the_checkpoint_are_made_again_and_recorded_once(tmp_path: Path, straight: Path) -> None:
    first = make(tmp_path, save_steps=2, callbacks=[StopAt(5)])
    first.train()
    shutil.rmtree(tmp_path / "checkpoint-5")  # as if the process had died in step 6, between two saves
    assert [line["step"] for line in records(tmp_path)[0]] == [1, 2, 3, 4, 5]
    make(tmp_path).train(resume_from_checkpoint=True)
    check_same_run(tmp_path, straight)


def test_resuming_a_run_without_a_checkpoint_starts_anew_and_drops_its_lines(
    tmp_path: Path, straight: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(straight / "metrics.jsonl", tmp_path)
    (tmp_path / "completions.jsonl").write_text('{"step": 1, "prompt": "half a li')
    make(tmp_path).train(resume_from_checkpoint=True)
    assert "has no checkpoint yet: starting from step 0" in caplog.text
    check_same_run(tmp_path, straight)


def test_resuming_a_finished_run_trains_nothing(tmp_path: Path, straight: Path) -> None:
    folder = shutil.copytree(straight, tmp_path / "run")
    output = make(folder).train(resume_from_checkpoint=True)
    assert (output.global_step, output.finished) == (6, True)
    check_same_run(folder, straight)


def test_other_settings_are_named_on_resume_and_other_data_refused(
    tmp_path: Path, straight: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(straight, tmp_path / "run")
    caplog.set_level(logging.WARNING)
    make(folder, max_steps=7, learning_rate=3e-3).train(resume_from_checkpoint=True)
    assert "learning_rate: 0.01 -> 0.003" in caplog.text
    assert "max_steps: 6 -> 7" in caplog.text
    with pytest.raises(DataError, match="dataset of 7 rows, this one has 6"):
        make(folder, rows=ROWS[:6]).train(resume_from_checkpoint=True)


# Fine-tuning


def fine_tune(folder: Path, stop: int | None = None, resume: bool = False, **settings: Any) -> SFTTrainer:
    """Train the embedded model with dropout on seven rows, two in a step; `stop` ends it after that step."""
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(bare, r=4, lora_dropout=0.1, use_gradient_checkpointing=False)
    rows = [row | {"completion": f"Answer = {index}"} for index, row in enumerate(ROWS)]
    config = SFTConfig(output_dir=str(folder), **(TAUGHT | settings))
    trainer = SFTTrainer(model, rows, config, eval_dataset=rows[:2], callbacks=[] if stop is None else [StopAt(stop)])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_resumed_fine_tuning_is_the_undisturbed_one(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fine_tune(whole)
    fine_tune(parts, stop=3)
    assert [path.name for path in checkpoint.list_checkpoints(parts)] == ["checkpoint-2", "checkpoint-3"]
    shutil.rmtree(parts / "checkpoint-3")  # so step 3 is made again
    assert fine_tune(parts, resume=True).state.global_step == 6
    adapters = [load_file(path / "adapter" / "adapter_model.safetensors") for path in (whole, parts)]
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert records(parts, completions=False) == records(whole, completions=False)
    assert [path.name for path in checkpoint.list_checkpoints(parts)] == ["checkpoint-4", "checkpoint-6"]


# Ctrl-C


def environment() -> dict[str, str]:
    here = Path(__file__).parent
    paths = os.pathsep.join(filter(None, [str(here), str(here.parent / "support"), os.environ.get("PYTHONPATH")]))
    return os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def test_ctrl_c_finishes_and_saves_the_step_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [
        sys.executable, "-c", "from lowmem_grpo.cli import main; main()", "run", "arithmetic", f"output_dir={run}",
        "max_steps=8", "per_device_train_batch_size=16", "gradient_accumulation_steps=1", "num_generations=8",
        "save_steps=100", "max_completion_length=32", "eval_problems=4", "train_size=16",
    ]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    deadline = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    steps = [line["step"] for line in records(run)[0]]
    assert 1 <= len(steps) < 8
    assert "finishing this step" in said
    assert f"stopped at step {steps[-1]}" in said
    assert "resume" in said
    assert [path.name for path in checkpoint.list_checkpoints(run)] == [f"checkpoint-{steps[-1]}"]
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    second = subprocess.run([*command, "resume=true"], env=environment(), capture_output=True, text=True, timeout=120)
    assert second.returncode == 0, second.stderr
    assert [line["step"] for line in records(run)[0]] == list(range(1, 9))
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    def impatient(completions: list[str], **kwargs: Any) -> list[float]:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        time.sleep(5)
        return digit_sum(completions)

    before, started = signal.getsignal(signal.SIGINT), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, impatient).train()
    assert time.monotonic() - started < 4
    assert signal.getsignal(signal.SIGINT) is before
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


# SIGKILL


def start(folder: Path) -> subprocess.Popen[str]:
    """A process that has begun to import; it trains when told."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder)], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )


def tell(process: subprocess.Popen[str]) -> None:
    """Wait for the imports, then let it train."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("go\n")
    process.stdin.flush()


def steps_saved(folder: Path) -> int:
    return max((int(path.name.rpartition("-")[2]) for path in checkpoint.list_checkpoints(folder)), default=0)


@pytest.mark.slow
def test_a_run_killed_at_any_moment_loses_and_repeats_nothing(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    waiting: deque[subprocess.Popen[str]] = deque()
    rng, alive = random.Random(0), 0
    started = time.monotonic()
    make(whole, **KILLED).train()
    pace = (time.monotonic() - started) / KILLED["max_steps"]
    try:
        for index in range(KILLS):
            while len(waiting) < min(3, KILLS - index):  # they import while another one trains
                waiting.append(start(killed))
            process = waiting.popleft()
            tell(process)
            wanted = steps_saved(killed) + rng.randrange(2)
            while steps_saved(killed) < wanted and process.poll() is None:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, pace))
            alive += process.poll() is None
            process.kill()
            process.wait()
    finally:
        for process in waiting:
            process.kill()
            process.wait()
    assert alive >= KILLS // 2  # else this machine ran the steps far faster than those before
    assert make(killed, **KILLED).train(resume_from_checkpoint=True).finished
    check_same_run(killed, whole)
    assert len(records(killed)[0]) == KILLED["max_steps"]
    assert not list(killed.glob(".checkpoint-*"))
    assert json.loads((killed / "summary.json").read_text())["status"] == "finished"


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
    check_same_run(tmp_path, straight)


def test_a_damaged_checkpoint_asked_for_by_name_is_refused(tmp_path: Path, straight: Path) -> None:
    folder = shutil.copytree(straight, tmp_path / "run")
    before = (folder / "metrics.jsonl").read_bytes()
    truncate(folder / "checkpoint-6" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is truncated"):
        make(folder).train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    with pytest.raises(CheckpointError, match="is not a folder"):
        make(folder).train(resume_from_checkpoint=str(folder / "checkpoint-7"))
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


def test_the_best_checkpoint_is_chosen_by_the_steps_since_the_last_save(tmp_path: Path) -> None:
    """With several optimizer steps a rollout, one line of metrics stands for all of them."""
    trainer = make(tmp_path, by_step, save_steps=2, num_iterations=2, save_total_limit=1, max_steps=8)
    trainer.train()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-8"]


def test_a_resumed_run_keeps_the_best_checkpoint_although_it_was_moved(tmp_path: Path) -> None:
    make(tmp_path / "here", by_step, save_steps=1, save_total_limit=1, callbacks=[StopAt(3)]).train()
    there = shutil.move(tmp_path / "here", tmp_path / "there")
    make(there, by_step, save_steps=1, save_total_limit=1).train(resume_from_checkpoint=True)
    assert [path.name for path in checkpoint.list_checkpoints(there)] == ["checkpoint-2", "checkpoint-6"]
