"""An evaluation tells what reward functions logged, as a step does."""

from pathlib import Path
from typing import Any

import pytest
from trainer_runs import ROWS, make

from lowmem_grpo.rollout.assessment import over_completions
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.types import Rollout, RolloutGroup


def test_what_functions_log_in_an_evaluation_is_in_the_log_and_given_to_callbacks_under_eval(tmp_path: Path) -> None:
    evaluated: list[tuple[float, float]] = []

    def graded(
        completions: list[Any], log_metric: Any, log_extra: Any, answer: list[str], **kwargs: Any
    ) -> list[float]:
        lengths = [float(len(completion[0]["content"])) for completion in completions]
        log_metric("acc", sum(lengths) / len(lengths))
        log_extra("size", [None, *lengths[1:]])
        log_extra("words", [str(length) for length in lengths])
        if answer[0] == "held out":
            evaluated.append((sum(lengths) / len(lengths), sum(lengths[1:]) / len(lengths[1:])))
        return [length % 7 for length in lengths]

    heard: list[dict[str, Any]] = []

    class Hears:
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
            heard.append(metrics)

    held_out = [row | {"answer": "held out"} for row in ROWS[:3]]
    trainer = make(tmp_path, graded, eval_dataset=held_out, eval_strategy="steps", eval_steps=1, callbacks=[Hears()])
    trainer.train()
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl") if "eval_reward" in line]
    for told in (lines, heard):
        assert [(one["eval_acc"], one["eval_size"]) for one in told] == [pytest.approx(pair) for pair in evaluated]
        assert len(told) == 2 and not [one for one in told if "eval_words" in one]


def test_parts_of_an_evaluation_count_by_their_completions() -> None:
    def part(completions: int, **logged: float) -> Any:
        return [RolloutGroup({}, [1], [Rollout([2], [0.0], "stop")] * completions)], logged

    assert over_completions([part(4, acc=1.0, seen=3.0), part(12, acc=0.0), ([], {})]) == {"acc": 0.25, "seen": 3.0}
