"""bench/learner/bench.py: lessons, verdicts on made-up rows, the page and the picture."""

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click import ClickException
from click.testing import CliRunner
from tables import every_row

from bench.learner.bench import curve, fresh, main, recipe_command, verdict
from bench.learner.lessons import answer_of, lessons
from bench.learner.picture import draw, shown
from bench.learner.section import card_learning_table
from bench.learner.sizes import LESSON, SIZES, read_lesson, settings
from bench.tiny_models.from_scratch import make_model, make_tokenizer
from bench.tiny_models.tiny_model import ERROR_RATE
from lowmem_grpo.recipes.problems.arithmetic import Problem
from lowmem_grpo.recipes.problems.countdown import Countdown, answer_text, evaluate

BENCH = Path(__file__).resolve().parents[2] / "bench"


def row(recipe: str = "countdown", **changes: Any) -> dict[str, Any]:
    """A row as a run on a card writes it."""
    return {
        "recipe": recipe, "size": "full", "device": "cuda", "gpu": "NVIDIA H200", "cpu": "some", "cores": 8,
        "engine": "vllm", "parameters": 25_000_000, "accuracy_before": 0.4, "accuracy_after": 0.6,
        "eval_problems": 1000, "rewards": [0.4] * 5 + [0.7] * 5, "steps": 10, "train_seconds": 61.0,
        "pretrain": {"seconds": 180.0}, "peak_bytes": 2**30, "commit": "abc",
    } | changes


def gone(row: dict[str, Any], reason: str) -> dict[str, Any]:
    """The row of a recipe that failed."""
    return {name: value for name, value in row.items() if not name.startswith("accuracy")} | {"missing": reason}


# lessons


def test_planted_mistakes_are_as_many_as_wanted_use_the_given_numbers_and_claim_to_be_right() -> None:
    rng, source, wrong = random.Random(0), lessons("test"), 0
    puzzles = [problem for problem, _ in zip(source, range(2000), strict=False) if isinstance(problem, Countdown)]
    for puzzle in puzzles:
        text = answer_of(puzzle, rng)
        answer = evaluate(answer_text(text))
        assert answer is not None and answer.numbers == Counter(puzzle.numbers), text
        assert text.splitlines()[-2].endswith(f"= {puzzle.target}")  # also where that is a lie
        wrong += answer.value != puzzle.target
    assert wrong / len(puzzles) == pytest.approx(ERROR_RATE, abs=0.04)


def test_lessons_are_training_problems_of_both_tasks_in_turn() -> None:
    taught = [problem for problem, _ in zip(lessons("a"), range(400), strict=False)]
    assert {problem.split for problem in taught} == {"train"}
    assert Counter(type(problem) for problem in taught) == {Problem: 200, Countdown: 200}
    again, other = ([p.question for p, _ in zip(lessons(seed), range(20), strict=False)] for seed in ("a", "b"))
    assert again == [problem.question for problem in taught[:20]] != other


@pytest.mark.parametrize("name", ["tiny", "small", "full"])
def test_every_size_suits_nf4_blocks_and_attention_kernels(name: str) -> None:
    shape = SIZES[name].shape
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    assert shape["hidden_size"] == 64 * heads and heads % kv_heads == 0
    assert all(shape[side] % 64 == 0 for side in ("hidden_size", "intermediate_size", "vocab_size"))


def test_the_full_size_has_10_to_30_million_parameters() -> None:
    model = make_model(make_tokenizer(["a text"], 300), 0, SIZES["full"].shape)
    assert 10e6 <= model.num_parameters() <= 30e6


def test_a_model_of_other_settings_is_not_used_again(tmp_path: Path) -> None:
    wanted = settings("tiny", 10, 0)
    assert read_lesson(tmp_path, wanted) is None
    (tmp_path / LESSON).write_text(json.dumps({"settings": wanted, "parameters": 1}))
    assert read_lesson(tmp_path, wanted) == {"settings": wanted, "parameters": 1}
    for other in (settings("tiny", 11, 0), settings("tiny", 10, 1), settings("small", 10, 0)):
        assert read_lesson(tmp_path, other) is None


# verdicts


@every_row(("changes", "good", "said"), [
    ({}, True, "noise 4.4%"), ({"accuracy_after": 0.44}, False, "no rise beyond noise (4.4%)"),
    ({"accuracy_after": 0.3}, False, "no rise"), ({"eval_problems": 100, "accuracy_after": 0.5}, False, "no rise"),
    ({"accuracy_after": 0.3, "device": "cpu"}, True, "judged only on a card"),
    ({"accuracy_after": 0.3, "size": "tiny"}, True, "nothing can be learnt"),
    ({"accuracy_after": 0.3, "gpu": "Null CUDA sm_90 (no GPU)"}, True, "nothing can be learnt"),
])
def test_only_a_real_model_on_a_real_card_must_learn(changes: dict[str, Any], good: bool, said: str) -> None:
    fine, line = verdict(row(**changes))
    assert fine is good and said in line, line


@pytest.mark.parametrize("size", ["tiny", "full"])
def test_a_run_that_broke_off_fails(size: str) -> None:
    assert verdict(gone(row(size=size), "out of memory")) == (False, "countdown: out of memory")


def test_a_process_that_fails_or_hangs_is_reported() -> None:
    assert fresh([sys.executable, "-c", "print('well')"], "cpu", None) is None
    assert fresh([sys.executable, "-c", "raise ValueError('no')"], "cpu", None) == "ValueError: no"
    assert fresh([sys.executable, "-c", "raise SystemExit(3)"], "cpu", None) == "exit code 3"
    assert fresh([sys.executable, "-c", "import time; time.sleep(60)"], "cpu", None, 1) == "took longer than 1 s"


# the page and the picture


def test_the_page_shows_the_newest_rows_and_failures_and_no_pretend_card() -> None:
    rows = [row(accuracy_after=0.1), row(), gone(row("arithmetic"), "no | vLLM"), row("arithmetic", size="tiny"),
            row(gpu="Null CUDA sm_90 (no GPU)", accuracy_after=0.99)]
    page = card_learning_table(rows)
    lines = [line for line in page if line.startswith("| ")][1:]
    assert len(lines) == 2
    assert "40.0% (1.5%) | 60.0% (1.5%) | 1000 | 0.40 to 0.70 | 10 | 61 | 180 | 1024 | NVIDIA H200 | abc |" in lines[0]
    assert "missing: no / vLLM" in lines[1]
    assert len({line.count("|") for line in page if line.startswith("|")}) == 1
    assert card_learning_table([row(size="tiny")]) == []


def test_the_picture_shows_every_recipe(tmp_path: Path) -> None:
    draw([row("arithmetic", rewards=[0.2, 1.1, 0.9]), row(rewards=[0.5])], tmp_path / "a.svg")
    words = " ".join(ElementTree.parse(tmp_path / "a.svg").getroot().itertext())
    assert "25.0 M parameters, NF4, vllm, NVIDIA H200" in words
    assert "arithmetic: mean reward of 3 steps" in words and "countdown: mean reward of 1 steps" in words
    assert "40.0% before, 60.0% after" in words


def test_the_picture_is_of_one_size_and_of_no_pretend_card() -> None:
    rows = [row("arithmetic", size="small", device="cpu", parameters=10**6), row(),
            row("arithmetic", gpu="Null CUDA sm_90 (no GPU)")]
    assert [(kept["recipe"], kept["size"]) for kept in shown(rows)] == [("countdown", "full")]
    with pytest.raises(ClickException, match="nothing to draw"):
        shown([gone(row(), "broken")])


# one run: all of it is walked by `make gpu-cpu`, which fails where a recipe has no figures


def test_a_curve_holds_every_step_and_the_peak_and_the_command_is_a_users(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"reward": 0.5, "completions/mean_length": 9.0, "memory/peak_bytes": 7, "sampling/parity/mean": 0.1},
             {"accuracy": 1.0}, {"reward": 0.7, "completions/mean_length": 8.0, "memory/peak_bytes": 5}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert curve(path) == {"rewards": [0.5, 0.7], "lengths": [9.0, 8.0], "peak_bytes": 7, "parity": 0.1}
    command = recipe_command("countdown", tmp_path, tmp_path / "run", "transformers", "tiny", 3)
    assert {"run", "countdown", "max_steps=2", "load_in_4bit=true", "seed=3", "largest_target=99"} <= set(command)


@pytest.mark.parametrize(("words", "said"), [
    (["--recipes", "gsm8k"], "gsm8k; choose from arithmetic, countdown"), (["--size", "huge"], "huge"),
    (["--time-limit", "0"], "0"),
])
def test_an_unknown_recipe_or_size_is_refused(words: list[str], said: str) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2 and said in result.output
