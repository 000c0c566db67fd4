"""What `train()` does with the findings: errors end the run, warnings are logged, and nothing else changes."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from preflight_runs import ROWS, found, make, nothing_right, reads_answer
from trainer_runs import ENDS, load

from lowmem_grpo import SFTConfig, SFTTrainer
from lowmem_grpo.trainer.preflight.checks import PreflightError


def test_a_healthy_run_prints_two_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = [{"prompt": [{"role": "user", "content": f"Start with {n}. Add 4. What is the result?"}]}
               for n in range(1000)]
    trainer = make(tmp_path, dataset, max_steps=3, save_strategy="steps", save_steps=3, max_completion_length=32,
                   **ENDS)
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines[1::2]] == ["step", "step"] and len(lines) == 5
    assert lines[0].startswith("preflight: checked 256 of 1,000 rows, ")
    assert "s a step (sampling " in lines[2] and "to go until step 3" in lines[2]
    assert "the next checkpoint is due at step 3, in " in lines[2]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_preflight_does_not_change_the_training(tmp_path: Path) -> None:
    adapters = []
    for preflight in (True, False):
        trainer = make(tmp_path / str(preflight), preflight=preflight, max_steps=1, disable_tqdm=True)
        trainer.train()
        adapters.append(torch.cat([p.detach().flatten() for p in trainer.policy.trainable]))
    assert torch.equal(*adapters)


def test_a_refused_run_leaves_the_files_of_the_run_before_it(tmp_path: Path, shared: Any) -> None:
    make(tmp_path, max_steps=1, save_strategy="steps").train()
    run = tmp_path / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    rows = [{"prompt": "1 + 1 = " * 30}]
    trainer = make(tmp_path, rows, reads_answer, shared, overwrite_output_dir=True, disable_tqdm=True)
    with pytest.raises(PreflightError, match=r"(?s)preflight found 2 problems; .*:\n- no row.*\n- reads_answer: it "):
        trainer.train()
    with pytest.raises(PreflightError):
        trainer.train(resume_from_checkpoint=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert trainer.source.position == 0


def test_warnings_are_logged_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert make(tmp_path, [*ROWS, {"prompt": ""}], max_steps=1, disable_tqdm=True).train().finished
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("preflight")]
    assert said == ["preflight: 1 of 13 rows will be skipped: empty prompt (1). What to do: correct or remove these "
                    "rows"]


def test_preflight_can_be_turned_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lowmem_grpo.trainer.preflight.checks.look_over", lambda subject: pytest.fail("it looked"))
    trainer = make(tmp_path, [*ROWS, {"prompt": ""}], nothing_right, preflight=False)
    assert trainer.train().finished
    assert [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()] == ["step"] * 2
    assert [record for record in caplog.records if record.getMessage().startswith(("preflight", "step 1:"))] == []
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["expected_seconds"] > 0


def test_fine_tuning_is_checked_without_asking_for_rewards(
    tmp_path: Path, shared: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row | {"completion": row["answer"]} for row in ROWS]
    settings: dict[str, Any] = {"output_dir": str(tmp_path / "sft"), "max_steps": 3, "per_device_train_batch_size": 2}
    trainer = SFTTrainer(load(), rows, SFTConfig(**settings))
    assert found(trainer) == []
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("preflight: checked 12 of 12 rows") and " s a step: " in lines[2] and len(lines) == 5
    tokenizer.chat_template = None
    with pytest.raises(PreflightError, match="no chat template"):
        SFTTrainer(shared, rows, SFTConfig(**(settings | {"output_dir": str(tmp_path / "none")}))).train()
    assert not (tmp_path / "none").exists()
