"""Recipe countdown: puzzles that can be solved and never leak, answers read safely, rewards, and a short run."""

import itertools
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lowmem_grpo.cli import main
from lowmem_grpo.recipes import countdown
from lowmem_grpo.recipes.countdown import answer_line, given_numbers, make_dataset, reaches_target
from lowmem_grpo.recipes.problems import countdown as countdown_problems
from lowmem_grpo.recipes.problems.countdown import (
    LONGEST,
    Countdown,
    Difficulty,
    allowed,
    answer_text,
    countdowns,
    evaluate,
)

EASY = Difficulty(3, 3, 20)
NUMBERS = [25, 3, 7]


def take(count: int, split: str = "train", seed: int = 0, difficulty: Difficulty | None = None) -> list[Countdown]:
    source = countdowns(split, seed, difficulty)
    return [next(source) for _ in range(count)]


def reachable(numbers: tuple[Fraction, ...]) -> Iterator[Fraction]:
    """Every value that the numbers make, all of them used: by trying everything, nothing of the package's own."""
    if len(numbers) == 1:
        yield numbers[0]
    for left, right in itertools.permutations(range(len(numbers)), 2):
        rest = tuple(number for place, number in enumerate(numbers) if place not in (left, right))
        a, b = numbers[left], numbers[right]
        for value in (a + b, a - b, a * b, *([a / b] if b else [])):
            yield from reachable((*rest, value))


# puzzles


@pytest.mark.parametrize("difficulty", [Difficulty(), EASY, Difficulty(2, 6, 99, 999), Difficulty(operators="+-")])
def test_a_puzzle_has_no_solution_or_a_wrong_one(difficulty: Difficulty) -> None:
    for puzzle in take(300, difficulty=difficulty):
        answer = evaluate(puzzle.solution)
        assert answer is not None and answer.value == puzzle.target, puzzle
        assert answer.numbers == Counter(puzzle.numbers), puzzle
        assert set(re.findall(r"[-+*/]", puzzle.solution)) <= set(difficulty.operators)
        assert puzzle.target not in puzzle.numbers
        assert 1 <= puzzle.target <= difficulty.largest_target
        assert difficulty.min_numbers <= len(puzzle.numbers) <= difficulty.max_numbers
        assert all(1 <= number <= difficulty.largest_number for number in puzzle.numbers)


def test_a_target_cannot_be_reached_by_trying_everything() -> None:
    for puzzle in take(40, difficulty=EASY):
        assert puzzle.target in set(reachable(tuple(map(Fraction, puzzle.numbers)))), puzzle


def test_the_steps_are_wrong_or_do_not_end_at_the_target() -> None:
    for puzzle in take(300):
        left = Counter(puzzle.numbers)
        for step in puzzle.steps:
            answer = evaluate(f"{step.left} {step.sign} {step.right}")
            assert answer is not None and answer.value == step.result > 0
            assert answer.numbers <= left
            left = left - answer.numbers + Counter([step.result])
        assert left == Counter([puzzle.target])


@pytest.mark.parametrize(("train_seed", "test_seed"), [(0, 0), (0, 1), (3407, 7)])
def test_no_test_puzzle_is_trained_on_in_any_order_or_difficulty(train_seed: int, test_seed: int) -> None:
    train = {p.key for p in take(2000, "train", train_seed, EASY)} | {p.key for p in take(2000, "train", train_seed)}
    tested = {p.key for p in take(800, "test", test_seed, EASY)} | {p.key for p in take(800, "test", test_seed)}
    assert not train & tested
    assert len(tested) > 1500


def test_the_order_of_the_numbers_decides_the_split() -> None:
    for numbers in itertools.permutations((3, 7, 25, 40)):
        assert Countdown(numbers, 54).split == Countdown((40, 25, 7, 3), 54).split


def test_puzzles_repeat_or_a_seed_does_not_repeat_them() -> None:
    keys = [puzzle.key for puzzle in take(1500)]
    assert len(set(keys)) == 1500
    assert keys[:50] == [puzzle.key for puzzle in take(50)]
    assert keys[:50] != [puzzle.key for puzzle in take(50, seed=1)]


def test_the_global_random_state_moves() -> None:
    state = random.getstate()
    make_dataset("train", 10)
    assert random.getstate() == state


def test_every_operator_occurs_often() -> None:
    text = " ".join(puzzle.solution for puzzle in take(600))
    assert min(text.count(sign) for sign in "+-*/") > 30
    assert text.count("(") > 30


def test_asking_for_more_puzzles_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"only about \d+ train puzzles with .*largest_number=4.*allow more"):
        make_dataset("train", 5000, difficulty=Difficulty(2, 2, 4, 10))


@pytest.mark.parametrize(("split", "difficulty", "message"), [
    ("train", Difficulty(6, 6, 50, 5, "+"), r"no train puzzle .*largest_target=5, operators='\+'\); allow fewer or sm"),
    ("test", Difficulty(2, 2, 4, 4, "*"), r"no test puzzle .*min_numbers=2.*a larger target"),
])
def test_a_difficulty_without_a_puzzle_never_ends(
    split: str, difficulty: Difficulty, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(countdown_problems, "HOPELESS", 2000)
    with pytest.raises(ValueError, match=message):
        next(countdowns(split, 0, difficulty))


@pytest.mark.parametrize(("options", "message"), [
    ({"min_numbers": 1}, "min_numbers is 1 and max_numbers 4; they must be 2 to 6"),
    ({"max_numbers": 7}, "2 to 6"), ({"min_numbers": 4, "max_numbers": 3}, "not above the second"),
    ({"largest_number": 100}, "largest_number is 100; it must be 4 to 99"), ({"largest_target": 2}, "4 to 999"),
    ({"operators": ""}, "operators is ''"), ({"operators": "+^"}, r"allowed are those of \+-\*/"),
    ({"operators": "-/"}, r"with \+ or \*"),
])
def test_a_difficulty_that_makes_no_puzzles_is_taken(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Difficulty(**options)


@pytest.mark.parametrize(("split", "size", "message"), [
    ("validation", 5, '"train" and "test"'), ("train", 0, "size is 0; it must be at least 1"),
])
def test_a_split_or_size_that_makes_no_sense_is_taken(split: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_dataset(split, size)


def test_the_dataset_lacks_a_column_or_the_question_a_number() -> None:
    dataset = make_dataset("test", 20)
    assert dataset.column_names == ["prompt", "answer", "numbers", "target"]
    for row in dataset:
        (message,) = row["prompt"]
        target, *numbers = map(int, re.findall(r"\d+", message["content"]))
        assert (target, numbers) == (row["target"], row["numbers"])
        assert countdown.solves(f"Answer: {row['answer']}", row["numbers"], row["target"])


# answers


@pytest.mark.parametrize(("text", "value", "numbers"), [
    ("(25 - 7) * 3", 54, [25, 7, 3]), ("1", 1, [1]), ("7/2", Fraction(7, 2), [7, 2]), ("2 - 3", -1, [2, 3]),
    ("8 / (3 - 8 / 3)", 24, [8, 3, 8, 3]), (" ( ( 4 ) ) ", 4, [4]), ("0 * 5", 0, [0, 5]),
])
def test_an_expression_is_misread(text: str, value: Any, numbers: list[int]) -> None:
    answer = evaluate(text)
    assert answer is not None
    assert (answer.value, answer.numbers) == (value, Counter(numbers))


@pytest.mark.parametrize("text", [
    None, "", " ", "abc", "__import__('os')", "2 ** 9", "7 // 2", "7 % 2", "-3 + 5", "+3", "3(4)", "(1, 2)", "()",
    "1 +", "1 2", "1.5 + 2", "1e9", "0x10", "1_000", "007", "\u0661 + \u0662", "\uff11+1", "5 / 0", "5 / (3 - 3)",
    "1\n+ 2", "lambda: 1", "1 if 1 else 2", "3 = 3", "(" * 300 + "1" + ")" * 300, "(" * 59 + "1", "9" * 5000,
    "1+" * 4000 + "1", "1 <2", "\x00", "9" * (LONGEST + 1), "[1]", "~1", "1j", "1 and 2", "*3",
])
def test_other_text_than_a_short_expression_is_worth_something_or_an_error(text: str | None) -> None:
    assert evaluate(text) is None


def test_the_deepest_and_the_longest_text_that_is_read_take_long_or_fail() -> None:
    begin = time.perf_counter()
    deep, long = "(" * 59 + "1" + ")" * 59, "1/" * 59 + "9"
    for text in (deep, long, "9" * LONGEST, "9*" * 59 + "9", "99999/" * 19 + "7"):
        assert len(text) <= LONGEST and evaluate(text) is not None
    for text in ("(" * 10**6, "Answer:" * 10**5, "1" * 10**7, "Answer: " + "(" * 10**6):
        evaluate(text)
        answer_text(text)
        reaches_target([text], numbers=[NUMBERS], target=[54])
    assert time.perf_counter() - begin < 2


@given(st.text(alphabet="0123456789+-*/() \n\u00b2\u0663aA_.,=", max_size=140))
def test_no_strange_text_breaks_the_rewards(text: str) -> None:
    for completion in (text, f"Answer: {text}"):
        values = [reward([completion], numbers=[NUMBERS], target=[54])[0] for reward in countdown.REWARDS]
        assert values[0] in (0.0, 1.0) and set(values[1:]) <= {0.0, 0.1}


@pytest.mark.parametrize(("text", "numbers", "right"), [
    ("25 - 7", NUMBERS, True), ("25 - 7 - 3", NUMBERS, True), ("25 - 25", NUMBERS, False), ("4 + 3", NUMBERS, False),
    ("5 + 5", [5, 5, 1], True), ("5 + 5 + 5", [5, 5, 1], False), ("no", NUMBERS, False),
])
def test_a_number_counts_that_was_not_given_or_was_used_up(text: str, numbers: list[int], right: bool) -> None:
    assert allowed(evaluate(text), numbers) is right


@pytest.mark.parametrize(("text", "found"), [
    ("Answer: 1 + 2", "1 + 2"), ("Answer: 1\nAnswer: 2", "2"), ("**Answer:** `3 * 4`.", "3 * 4`."), ("none", None),
    ("Answer: 3 \u00d7 4 \u00f7 2 \u2212 1", "3 * 4 / 2 - 1"), ("Answer:", ""), ("Answer: 1\nmore", "1"),
    ("Answer: **3 * 4**", "3 * 4"),
])
def test_the_answer_is_looked_for_in_the_wrong_place(text: str, found: str | None) -> None:
    assert answer_text(text) == found


# rewards


@pytest.mark.parametrize(("text", "right", "numbers", "line"), [
    ("25 - 7 = 18\n18 * 3 = 54\nAnswer: (25 - 7) * 3", 1.0, 0.1, 0.1), ("Answer: (25 - 7) * 3\n", 1.0, 0.1, 0.1),
    ("Answer: (25 - 7) * 3 = 54", 0.0, 0.0, 0.0), ("(25 - 7) * 3", 0.0, 0.0, 0.0), ("", 0.0, 0.0, 0.0),
    ("Answer: 54", 0.0, 0.0, 0.1), ("Answer: 27 * 2", 0.0, 0.0, 0.1), ("Answer: 25 + 7", 0.0, 0.1, 0.1),
    ("Answer: 25", 0.0, 0.0, 0.1), ("Answer: (25 - 7) * 3 * 1", 0.0, 0.0, 0.1), ("Answer: 25 - 7 * 3", 0.0, 0.1, 0.1),
    ("**Answer: (25 - 7) * 3**", 1.0, 0.1, 0.0), ("Answer: (25 - 7) * 3\nThat is it.", 1.0, 0.1, 0.0),
    ("Answer: (25 - 7) * 3\nAnswer: 25 + 7", 0.0, 0.1, 0.1), ("Answer: 3 * 3 * 3 + 3 * 3 * 3", 0.0, 0.0, 0.1),
])
def test_a_completion_earns_what_it_does_not_deserve(text: str, right: float, numbers: float, line: float) -> None:
    for completion in (text, [{"role": "assistant", "content": text}]):
        told: dict[str, Any] = {"numbers": [NUMBERS], "target": [54], "prompts": [""], "trainer_state": None}
        assert reaches_target([completion], **told) == [right]
        assert given_numbers([completion], **told) == [numbers]
        assert answer_line([completion], **told) == [line]


# short runs


def run(folder: Path, *words: str) -> Any:
    small = ["max_steps=1", "eval_problems=4", "train_size=8", "num_generations=2", "per_device_train_batch_size=4",
             "gradient_accumulation_steps=1", "max_completion_length=8", f"output_dir={folder}", "engine=transformers"]
    return CliRunner().invoke(main, ["run", "countdown", *small, *words])


def test_the_recipe_finishes_on_the_embedded_model(tmp_path: Path) -> None:
    result = run(tmp_path / "run", "max_numbers=3", "seed=3")
    assert result.exit_code == 0, result.output
    assert "The embedded tiny model does not know countdown" in result.output and "accuracy before" in result.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["recipe"], summary["status"], summary["steps"], summary["seed"]) == ("countdown", "finished", 1, 3)
    assert summary["eval_problems"] == 4 == len(summary["samples"])
    assert {"accuracy_before", "accuracy_after"} <= summary.keys()
    (line,) = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {f"rewards/{reward.__name__}/mean" for reward in countdown.REWARDS} <= line.keys()
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "run" / "report.html").is_file()
    again = run(tmp_path / "run")
    assert again.exit_code == 1 and "already holds a run" in again.output


@pytest.mark.parametrize(("word", "message"), [
    ("max_numbers=9", "they must be 2 to 6"), ("operators=^", "operators is '^'"), ("eval_problems=0", "size is 0"),
    ("engine=llama", "allowed: auto, transformers, vllm"),
])
def test_a_wrong_option_is_found_only_after_the_model_was_loaded(word: str, message: str, tmp_path: Path) -> None:
    result = run(tmp_path / "run", word)
    assert result.exit_code == 1
    assert message in result.output
    assert not (tmp_path / "run").exists()
