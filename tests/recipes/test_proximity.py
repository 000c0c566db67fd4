"""Recipe proximity: exact problems that never leak, demonstrations in the new format, pay by nearness, a short run."""

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from recipe_runs import run

from lowmem_grpo.recipes.proximity import (
    MAX_STEPS,
    MAX_STOCK,
    MIN_STEPS,
    MIN_STOCK,
    RIGHT,
    STEPS,
    WORDS,
    StockProblem,
    Task,
    make_dataset,
    make_demonstrations,
    rewards,
)

TASKS = pytest.mark.parametrize("task", [WORDS, STEPS], ids=["words", "steps"])
def take(count: int, split: str = "train", seed: int = 0) -> list[StockProblem]:
    return list(islice(WORDS.problems(split, seed), count))


def questions(dataset: Dataset) -> list[str]:
    return [prompt[-1]["content"] for prompt in dataset["prompt"]]


def test_the_question_and_the_worked_solution_agree() -> None:
    for problem in take(2000):
        first, *story, asked = problem.question.split(". ")
        assert asked == "How many boxes are left?" and MIN_STEPS <= len(problem.lines) == len(story) <= MAX_STEPS
        stock = int(re.findall(r"\d+", first)[0])
        for sentence, line in zip(story, problem.lines, strict=True):
            made_of, _, result = line.rpartition(" = ")
            assert line.startswith(f"{stock} ") and eval(made_of) == (stock := int(result)), line
            assert {*re.findall(r"\d+", sentence)} <= {*re.findall(r"\d+", made_of)}, line
            assert MIN_STOCK <= stock <= MAX_STOCK
        assert stock == problem.answer


@TASKS
def test_a_demonstration_is_right_and_earns_the_most(task: Task) -> None:
    shown, asked = make_demonstrations(200, 5, task), make_dataset("train", 200, 5, task)
    assert shown["prompt"] == asked["prompt"]
    columns: dict[str, Any] = {"completions": list(shown["completion"]), "answer": list(asked["answer"])}
    assert RIGHT(**columns) == [1.0] * 200
    assert all(map(task.has_form, shown["completion"]))
    paid = {reward.__name__: set(reward(**columns)) for reward in rewards(task)}
    assert paid.pop("proximity") == paid.pop("number_equal") == {1.0}
    assert paid in ({"format_kept": {0.5}, "tags_counted": {0.4}}, {"answer_line": {0.1}})


@TASKS
def test_nearer_answers_earn_more_and_answers_outside_the_format_lose(task: Task) -> None:
    def total(text: str) -> float:
        return sum(reward(completions=[text], answer=["50"])[0] or 0.0 for reward in rewards(task))

    exact_answer, near, far, outlier = (total(task.solution(["work"], number)) for number in (50, 48, 10, 5000))
    assert exact_answer > near + 1 > far + 1 > outlier + 1
    assert total("50") < far and total("") < 0
    assert not task.has_form("50") and not task.has_form("Answer: 50")


# short runs


FEW = ("eval_problems=8", "train_size=16")


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_the_format_is_taught_first_and_only_once(tmp_path: Path) -> None:
    result = run("proximity", tmp_path, *FEW, "sft_steps=6")
    assert result.exit_code == 0, result.output
    summary = summary_of(tmp_path)
    assert (summary["recipe"], summary["sft_steps"], summary["taught_format_before"]) == ("proximity", 6, 0.0)
    assert summary["taught_format_after_sft"] >= 0.5
    assert {"accuracy_before", "accuracy_after_sft", "accuracy_after", "taught_format_after"} <= summary.keys()
    assert "answers as `Answer = N`: 0.0% before" in result.output and "after GRPO" in result.output
    taught = (tmp_path / "sft" / "adapter" / "adapter_model.safetensors").read_bytes()
    again = run("proximity", tmp_path, *FEW, "sft_steps=6", "max_steps=2", "resume=true")
    assert again.exit_code == 0, again.output
    assert "of fine-tuning" not in again.output
    assert (tmp_path / "sft" / "adapter" / "adapter_model.safetensors").read_bytes() == taught
    assert summary_of(tmp_path)["steps"] == 2 and summary_of(tmp_path)["taught_format_after"] >= 0.5


def test_fine_tuning_can_be_left_out(tmp_path: Path) -> None:
    result = run("proximity", tmp_path, *FEW, "sft_steps=0")
    assert result.exit_code == 0, result.output
    assert "sft_steps" not in summary_of(tmp_path) and not (tmp_path / "sft").exists()
