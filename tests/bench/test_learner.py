"""bench/learner/bench.py: lessons, verdicts on made-up rows, the page and the picture, and one tiny run of all of
it."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click import ClickException
from click.testing import CliRunner

from bench.learner.bench import fresh, main, verdict
from bench.learner.lessons import answer_of, lessons
from bench.learner.picture import draw, shown
from bench.learner.section import card_learning_table
from bench.learner.sizes import LESSON, SIZES, read_lesson, settings
from lowmem_grpo.recipes.problems.arithmetic import Problem
from lowmem_grpo.recipes.problems.countdown import Countdown, answer_text, evaluate
from lowmem_grpo.recipes.tiny.from_scratch import make_model, make_tokenizer
from lowmem_grpo.recipes.tiny.tiny_model import ERROR_RATE

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


def test_a_planted_mistake_is_right_or_uses_other_numbers_or_mistakes_are_too_many() -> None:
    rng, source, wrong = random.Random(0), lessons("test"), 0
    puzzles = [problem for problem, _ in zip(source, range(2000), strict=False) if isinstance(problem, Countdown)]
    for puzzle in puzzles:
        text = answer_of(puzzle, rng)
        answer = evaluate(answer_text(text))
        assert answer is not None and answer.numbers == Counter(puzzle.numbers), text
        assert text.splitlines()[-2].endswith(f"= {puzzle.target}")  # also where that is a lie
        wrong += answer.value != puzzle.target
    assert wrong / len(puzzles) == pytest.approx(ERROR_RATE, abs=0.04)


def test_a_lesson_is_a_test_problem_or_one_task_is_missing() -> None:
    taught = [problem for problem, _ in zip(lessons("a"), range(400), strict=False)]
    assert {problem.split for problem in taught} == {"train"}
    assert Counter(type(problem) for problem in taught) == {Problem: 200, Countdown: 200}
    again, other = ([p.question for p, _ in zip(lessons(seed), range(20), strict=False)] for seed in ("a", "b"))
    assert again == [problem.question for problem in taught[:20]] != other


@pytest.mark.parametrize("name", ["tiny", "small", "full"])
def test_a_size_does_not_suit_nf4_blocks_or_attention_kernels(name: str) -> None:
    shape = SIZES[name].shape
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    assert shape["hidden_size"] == 64 * heads and heads % kv_heads == 0
    assert all(shape[side] % 64 == 0 for side in ("hidden_size", "intermediate_size", "vocab_size"))


def test_the_full_size_is_no_small_language_model() -> None:
    model = make_model(make_tokenizer(["a text"], 300), 0, SIZES["full"].shape)
    assert 10e6 <= model.num_parameters() <= 30e6


def test_a_model_of_other_settings_is_taken_for_the_one_that_is_wanted(tmp_path: Path) -> None:
    wanted = settings("tiny", 10, 0)
    assert read_lesson(tmp_path, wanted) is None
    (tmp_path / LESSON).write_text(json.dumps({"settings": wanted, "parameters": 1}))
    assert read_lesson(tmp_path, wanted) == {"settings": wanted, "parameters": 1}
    for other in (settings("tiny", 11, 0), settings("tiny", 10, 1), settings("small", 10, 0)):
        assert read_lesson(tmp_path, other) is None


# verdicts


@pytest.mark.parametrize(("changes", "good", "said"), [
    ({}, True, "noise 4.4%"), ({"accuracy_after": 0.44}, False, "no rise beyond noise (4.4%)"),
    ({"accuracy_after": 0.3}, False, "no rise"), ({"eval_problems": 100, "accuracy_after": 0.5}, False, "no rise"),
    ({"accuracy_after": 0.3, "device": "cpu"}, True, "judged only on a card"),
    ({"accuracy_after": 0.3, "size": "tiny"}, True, "nothing can be learnt"),
    ({"accuracy_after": 0.3, "gpu": "Null CUDA sm_90 (no GPU)"}, True, "nothing can be learnt"),
])
def test_a_run_that_did_not_learn_on_a_card_passes(changes: dict[str, Any], good: bool, said: str) -> None:
    fine, line = verdict(row(**changes))
    assert fine is good and said in line, line


@pytest.mark.parametrize("size", ["tiny", "full"])
def test_a_run_that_broke_off_passes(size: str) -> None:
    assert verdict(gone(row(size=size), "out of memory")) == (False, "countdown: out of memory")


def test_a_process_that_fails_or_hangs_goes_unseen() -> None:
    assert fresh([sys.executable, "-c", "print('well')"], "cpu", None) is None
    assert fresh([sys.executable, "-c", "raise ValueError('no')"], "cpu", None) == "ValueError: no"
    assert fresh([sys.executable, "-c", "raise SystemExit(3)"], "cpu", None) == "exit code 3"
    assert fresh([sys.executable, "-c", "import time; time.sleep(60)"], "cpu", None, 1) == "took longer than 1 s"


# the page and the picture


def test_the_page_shows_an_old_row_or_hides_a_failure() -> None:
    rows = [row(accuracy_after=0.1), row(), gone(row("arithmetic"), "no | vLLM"), row("arithmetic", size="tiny"),
            row(gpu="Null CUDA sm_90 (no GPU)", accuracy_after=0.99)]
    page = card_learning_table(rows)
    lines = [line for line in page if line.startswith("| ")][1:]
    assert len(lines) == 2
    assert "40.0% (1.5%) | 60.0% (1.5%) | 1000 | 0.40 to 0.70 | 10 | 61 | 180 | 1024 | NVIDIA H200 | abc |" in lines[0]
    assert "missing: no / vLLM" in lines[1]
    assert len({line.count("|") for line in page if line.startswith("|")}) == 1
    assert card_learning_table([row(size="tiny")]) == []


def test_the_picture_is_no_svg_or_lacks_a_recipe(tmp_path: Path) -> None:
    draw([row("arithmetic", rewards=[0.2, 1.1, 0.9]), row(rewards=[0.5])], tmp_path / "a.svg")
    words = " ".join(ElementTree.parse(tmp_path / "a.svg").getroot().itertext())
    assert "25.0 M parameters, NF4, vllm, NVIDIA H200" in words
    assert "arithmetic: mean reward of 3 steps" in words and "countdown: mean reward of 1 steps" in words
    assert "40.0% before, 60.0% after" in words


def test_the_picture_mixes_sizes_or_shows_a_pretend_card() -> None:
    rows = [row("arithmetic", size="small", device="cpu", parameters=10**6), row(),
            row("arithmetic", gpu="Null CUDA sm_90 (no GPU)")]
    assert [(kept["recipe"], kept["size"]) for kept in shown(rows)] == [("countdown", "full")]
    with pytest.raises(ClickException, match="nothing to draw"):
        shown([gone(row(), "broken")])


# one run


@pytest.mark.slow
def test_a_tiny_run_does_not_go_through_everything(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.learner.bench", "--device", "cpu", "--size", "tiny", "--time-limit", "5",
               "--recipes", "countdown", "--workdir", str(tmp_path / "work"), "--output", str(tmp_path / "rows.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False, cwd=tmp_path,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "nothing can be learnt here" in done.stdout
    (found,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert "missing" not in found
    assert (found["recipe"], found["steps"], found["engine"], found["load_in_4bit"]) == (
        "countdown", 2, "transformers", True)
    assert len(found["rewards"]) == 2 and found["pretrain"]["steps"] == 4
    assert all(0 <= found[f"accuracy_{when}"] <= 1 for when in ("before", "after"))
    assert found["peak_bytes"] > 2**20 and found["parameters"] > 10**5 and found["commit"]
    summary = json.loads((tmp_path / "work" / "countdown-tiny" / "summary.json").read_text())
    assert summary["config"]["max_steps"] == 2


@pytest.mark.parametrize(("words", "said"), [
    (["--recipes", "gsm8k"], "gsm8k; choose from arithmetic, countdown"), (["--size", "huge"], "huge"),
    (["--time-limit", "0"], "0"),
])
def test_an_unknown_recipe_or_size_is_taken(words: list[str], said: str) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2 and said in result.output
