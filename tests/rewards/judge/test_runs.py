"""Runs with a judge: what fails costs its group the gradient, and never the run."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_models import TINY, load_model
from trainer_runs import load
from transformers import AutoTokenizer

from lowmem_grpo import GRPOConfig, GRPOTrainer, rewards
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.recipes.arithmetic import correct_answer, make_dataset
from tests.attacks.judge_server import by_length, chat, in_turn, serving

DATA = make_dataset("train", 16)
SETTINGS: dict[str, Any] = {
    "max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "max_completion_length": 40, "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-3,
}


@pytest.fixture
def model() -> FastPeftModel:
    return load(2048, "tiny")


def train(model: FastPeftModel, funcs: list[Any], folder: Path) -> dict[str, Any]:
    """The metrics of the run's only step."""
    config = GRPOConfig(**SETTINGS, output_dir=str(folder / "run"))
    assert GRPOTrainer(model, funcs, config, DATA).train().finished
    line: dict[str, Any] = json.loads((folder / "run" / "metrics.jsonl").read_text())
    return line


def test_one_group_without_a_judgement_does_not_take_the_others_with_it(model: FastPeftModel, tmp_path: Path) -> None:
    with serving(in_turn(chat("Lovely, both."), by_length)) as server:
        judge = rewards.UrlJudge(server.url, "m", "k", retries=0, concurrency=1)
        line = train(model, [rewards.ruler(judge), correct_answer], tmp_path)
    assert line["judge/ruler/failed"] == 0.5 and line["groups/with_signal"] == 1 and line["grad_norm"] > 0


@pytest.mark.slow
def test_a_base_model_that_babbles_does_not_end_the_run(model: FastPeftModel, tmp_path: Path) -> None:
    judge = rewards.SelfJudge(model, max_tokens=8)
    line = train(model, [rewards.ruler(judge), correct_answer], tmp_path)
    assert line["judge/ruler/failed"] == 1 and "rewards/ruler/mean" not in line
    assert line["groups/with_signal"] == 0, "correct_answer has an opinion, and the judge is required"
    assert (judge.meter.calls, judge.meter.retried, judge.meter.failed) == (2, 2, 2)


def test_a_reason_that_no_file_can_hold_does_not_end_the_run(model: FastPeftModel, tmp_path: Path) -> None:
    def strange(completions: list[str], log_extra: Any, **kwargs: Any) -> list[float]:
        log_extra("odd", ["half \ud83d"] * len(completions))
        return [float(len(text)) for text in completions]

    train(model, [strange], tmp_path)
    lines = (tmp_path / "run" / "completions.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["extra"]["odd"] for line in lines] == ["half ?"] * 8


@pytest.mark.slow
def test_a_check_before_the_run_shows_a_failing_judge(model: FastPeftModel) -> None:
    config = GRPOConfig(**SETTINGS)
    with serving(in_turn((401, {"error": {"message": "wrong key"}}))) as server:
        funcs = [rewards.ruler(rewards.UrlJudge(server.url, "m", "k", retries=0)), correct_answer]
        console = Console(file=io.StringIO(), width=200)
        found = rewards.check(funcs, DATA, model, config, groups=2, console=console)
        assert "wrong key" in console.file.getvalue()  # type: ignore[attr-defined]
    (finding,) = found.of("ruler")
    assert finding.severity == "error" and not found.ok
    assert "None for 8 of 8 completions" in finding.problem and "wrong key" in finding.problem
    assert finding.fix == "give the right api_key"


def test_a_judge_can_be_used_in_trl(tmp_path: Path) -> None:
    from trl import GRPOConfig as TheirConfig
    from trl import GRPOTrainer as TheirTrainer
    from trl_runs import PLAIN

    settings = PLAIN | {"output_dir": str(tmp_path), "per_device_train_batch_size": 8, "num_generations": 4,
                        "logging_strategy": "steps", "logging_steps": 1, "max_steps": 1}
    with serving(by_length) as server:
        judge = rewards.UrlJudge(server.url, "m", "k")
        trainer = TheirTrainer(
            model=load_model("tiny"), args=TheirConfig(**settings), train_dataset=DATA,
            reward_funcs=[rewards.ruler(judge), rewards.judged(judge)],
            processing_class=AutoTokenizer.from_pretrained(TINY),
        )
        trainer.train()
    line = trainer.state.log_history[0]
    assert line["judge/ruler/failed"] == 0 and 0 <= line["rewards/ruler/mean"] <= 1 and "rewards/judged/mean" in line
