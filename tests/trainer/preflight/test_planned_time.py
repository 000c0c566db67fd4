"""A run's planned seconds: of the lengths that a step really had, beside the measured ones, and never on the CPU."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer_runs import TEXTS, make

from lowmem_grpo.memory.cards import device
from lowmem_grpo.memory.model_shape import ModelShape, named_config
from lowmem_grpo.memory.plan import RunSettings, Workload
from lowmem_grpo.memory.planner import plan
from lowmem_grpo.memory.time_plan import plan_time
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.runs.views.charts import figures
from lowmem_grpo.trainer.preflight.checks import before_training
from lowmem_grpo.trainer.preflight.resources import how_long
from lowmem_grpo.trainer.preflight.subject import Subject
from lowmem_grpo.trainer.run_memory import PlannedTime, plan_run, settings_of, workload_of
from lowmem_grpo.types import TOKEN_FIELDS, Rollout, RolloutGroup

CONFIG = named_config("qwen2.5-3b")


def planned(card: str = "h200") -> PlannedTime:
    return PlannedTime(plan(CONFIG, RunSettings(640), device(card)), CONFIG)


def group(prompt: int, *lengths: int) -> RolloutGroup:
    rollouts = [Rollout([1] * length, [0.0] * length, "stop", "") for length in lengths]
    return RolloutGroup({}, [1] * prompt, rollouts)


def paid(completions: list[Any], **_: Any) -> list[float]:
    return [float(number % 2) for number, _ in enumerate(completions)]


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    return make(tmp_path / "run", paid, TEXTS, max_completion_length=16, disable_tqdm=True)


def on_card(trainer: Any, card: str) -> Any:
    """The trainer's plan as it would be on a card."""
    settings = settings_of(trainer.model, trainer.args, "transformers", 128)
    found = plan_run(settings, trainer.model, replace(device(card), name=card))
    trainer.memory.advice.plan = found
    trainer.parts = replace(trainer.parts, planned_time=PlannedTime(found, trainer.model.config))
    return trainer


def test_a_step_is_planned_with_the_lengths_that_it_had() -> None:
    found = workload_of([group(10, 4, 8), group(30, 12, 16)], updates=2, iterations=1, forward_only=1)
    assert found == Workload(2, 2, 20, 10, 16, 1, 2, 1)
    seconds = planned().metrics([group(100, *[200] * 8)] * 8, [group(100, *[200] * 8)] * 8)
    expected = plan_time(plan(CONFIG, RunSettings(640), device("h200")), ModelShape.from_config(CONFIG),
                         Workload(8, 8, 100, 200, 200))
    assert seconds == {
        "time/planned_generate_s": pytest.approx(expected.generate_seconds),
        "time/planned_train_s": pytest.approx(expected.train_seconds),
        "time/planned_step_s": pytest.approx(expected.step_seconds),
    }


def test_sampling_passes_before_training_and_more_updates_are_each_planned_for() -> None:
    groups = [group(100, *[200] * 8)] * 8
    sampled, plain = planned().metrics(groups, groups[:1]), planned().metrics(groups[:1], groups[:1])
    assert sampled["time/planned_train_s"] == plain["time/planned_train_s"]
    assert sampled["time/planned_generate_s"] > plain["time/planned_generate_s"]
    names = [(), ("ref_logprobs",), ("old_logprobs", "entropy", "ref_logprobs")]
    before = [[TOKEN_FIELDS[name] for name in some] for some in names]
    none, one, two = (planned().metrics(groups, groups, fields=fields)["time/planned_train_s"] for fields in before)
    assert none < one < two and two - one == pytest.approx(one - none)
    again = planned().plan_step(workload_of(groups))
    assert again is not None  # vLLM sleeps once, however often a step trains
    twice = planned().metrics(groups, groups, 2, 2)["time/planned_train_s"]
    assert twice == pytest.approx(2 * none - again.seconds["memory"])


def test_nothing_is_planned_without_completions_or_a_data_sheet() -> None:
    for groups in ([], [group(10)], [group(10, 0)]):
        assert planned().metrics(groups, groups) == {} and workload_of(groups) is None
    assert planned("24GiB").metrics([group(100, 200)], [group(100, 200)]) == {}


def test_a_run_on_the_cpu_logs_no_planned_seconds(trainer: Any) -> None:
    assert how_long(Subject(trainer)) is None
    trainer.train()
    assert not [key for line in read_lines(trainer.run_dir / "metrics.jsonl") for key in line if "planned" in key]


def test_a_run_on_a_known_card_logs_planned_beside_measured_seconds(trainer: Any) -> None:
    on_card(trainer, "NVIDIA H200").train()
    for line in read_lines(trainer.run_dir / "metrics.jsonl"):
        assert line["time/planned_step_s"] > line["time/planned_generate_s"] + line["time/planned_train_s"] > 0
        assert line["step_time"] > 0


def test_the_report_draws_measured_beside_estimated_seconds() -> None:
    rows = [{"step": step, "step_time": 2.5, "time/planned_step_s": 2.3} for step in (1, 2)]
    (chart,) = [chart for chart in figures(rows) if chart.title == "Seconds of a step"]
    drawn = {line.name: [value for _, value in line.points] for line in chart.lines}
    assert drawn == {"measured": [2.5, 2.5], "estimated from the card's data sheet": [2.3, 2.3]}


def test_preflight_says_how_long_a_run_should_take_and_that_it_is_an_estimate(trainer: Any) -> None:
    said: list[str] = []
    on_card(trainer, "Tesla T4")
    trainer.view = SimpleNamespace(say=said.append)
    trainer.args.preflight = True
    before_training(trainer)
    (line,) = [text for text in said if "estimated" in text]
    assert line.startswith("estimated, not measured: ")
    assert " a step on t4 (sampling " in line and " for 2 steps, if completions average 6 of at most 16 tokens" in line


def test_fine_tuning_and_unknown_cards_are_told_nothing(trainer: Any) -> None:
    subject = Subject(on_card(trainer, "Tesla T4"))
    subject.does_sampling = False
    assert how_long(subject) is None and how_long(Subject(on_card(trainer, "16GiB"))) is None
