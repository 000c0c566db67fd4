"""Recipe proximity: exact problems that never leak, demonstrations in the new format, pay by nearness, a short run."""

import json
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from recipe_runs import records, run_well

from lowmem_grpo.recipes.proximity import (
    GOODS,
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
PARTS = {"Half": 2, "A third": 3, "A quarter": 4, "A fifth": 5, "An eighth": 8}
TIMES = {"twice": 2, "three times": 3, "four times": 4}
RULES: list[tuple[str, Callable[..., int]]] = [  # sentences, and the stock after them, read off the text alone
    (r"(\d+) carts of (\d+) boxes each arrive", lambda stock, carts, boxes: stock + int(carts) * int(boxes)),
    (r"(\D+) of all boxes is sold", lambda stock, part: stock - exact(stock, PARTS[part])),
    (r"(\d+) boxes are sold", lambda stock, boxes: stock - int(boxes)),
    (r"(\d+) shelves with (\d+) boxes each get wet and are thrown away",
     lambda stock, shelves, boxes: stock - int(shelves) * int(boxes)),
    (r"Another warehouse sends (\D+) as many boxes as there are now", lambda stock, times: stock * (1 + TIMES[times])),
]


def exact(stock: int, part: int) -> int:
    assert stock % part == 0
    return stock // part


def stocks(question: str) -> list[int]:
    """What the warehouse holds at first and after each sentence."""
    form = rf"A warehouse holds (\d+) boxes of ({'|'.join(GOODS)})\. (.*) How many boxes are left\?"
    start = re.fullmatch(form, question)
    assert start, question
    found = [int(start[1])]
    for sentence in start[3].removesuffix(".").split(". "):
        ((match, rule),) = [(match, rule) for form, rule in RULES if (match := re.fullmatch(form, sentence))]
        found.append(rule(found[-1], *match.groups()))
    return found


def take(count: int, split: str = "train", seed: int = 0) -> list[StockProblem]:
    return list(islice(WORDS.problems(split, seed), count))


def questions(dataset: Dataset) -> list[str]:
    return [prompt[-1]["content"] for prompt in dataset["prompt"]]


def test_the_question_and_the_worked_solution_agree() -> None:
    for problem in take(2000):
        held = stocks(problem.question)
        assert held[-1] == problem.answer
        assert len(held) - 1 == len(problem.lines) and MIN_STEPS <= len(problem.lines) <= MAX_STEPS
        assert all(MIN_STOCK <= stock <= MAX_STOCK for stock in held)
        for before, after, line in zip(held, held[1:], problem.lines, strict=False):
            made_of, _, result = line.rpartition(" = ")
            assert line.startswith(f"{before} ") and eval(made_of) == after == int(result), line


def test_every_event_happens_often() -> None:
    text = "\n".join(". ".join(problem.question.split(". ")[1:-1]) for problem in take(1000))
    for form, _ in RULES:
        assert len(re.findall(form.replace(r"\D+", "[A-Za-z ]+"), text)) > 300, form


@TASKS
def test_no_test_problem_is_shown_in_a_demonstration(task: Task) -> None:
    assert not set(questions(make_dataset("test", 2000, 7, task))) & set(questions(make_demonstrations(2000, 0, task)))


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


def test_the_embedded_model_is_only_asked_for_words_that_it_can_write() -> None:
    assert [message["role"] for message in STEPS.prompt("1 + 1?")] == ["user"]
    assert [message["role"] for message in WORDS.prompt("1 + 1?")] == ["system", "user"]
    assert make_demonstrations(1, 5, STEPS)[0]["completion"].splitlines()[-1].startswith("Answer = ")


# short runs


FEW = ("eval_problems=8", "train_size=16")


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_the_format_is_taught_first_and_only_once(tmp_path: Path) -> None:
    result = run_well("proximity", tmp_path, *FEW, "sft_steps=6")
    summary = summary_of(tmp_path)
    assert (summary["recipe"], summary["sft_steps"], summary["taught_format_before"]) == ("proximity", 6, 0.0)
    assert summary["taught_format_after_sft"] >= 0.5
    assert {"accuracy_before", "accuracy_after_sft", "accuracy_after", "taught_format_after"} <= summary.keys()
    assert "answers as `Answer = N`: 0.0% before" in result.output and "after GRPO" in result.output
    taught = (tmp_path / "sft" / "adapter" / "adapter_model.safetensors").read_bytes()
    again = run_well("proximity", tmp_path, *FEW, "sft_steps=6", "max_steps=2", "resume=true")
    assert "of fine-tuning" not in again.output
    assert (tmp_path / "sft" / "adapter" / "adapter_model.safetensors").read_bytes() == taught
    assert summary_of(tmp_path)["steps"] == 2 and summary_of(tmp_path)["taught_format_after"] >= 0.5


def test_fine_tuning_can_be_left_out(tmp_path: Path) -> None:
    run_well("proximity", tmp_path, *FEW, "sft_steps=0")
    assert "sft_steps" not in summary_of(tmp_path) and not (tmp_path / "sft").exists()


def test_the_policy_that_grpo_begins_with_after_fine_tuning_is_the_reference_of_its_kl_term(tmp_path: Path) -> None:
    run_well("proximity", tmp_path, *FEW, "sft_steps=2", "beta=0.1")
    assert records(tmp_path)[1]["kl"] == 0
    run_well("proximity", tmp_path / "base", *FEW, "sft_steps=2", "beta=0.1", "kl_reference=base")
    assert records(tmp_path / "base")[1]["kl"] > 0
