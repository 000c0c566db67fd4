"""Recipe countdown: puzzles that can be solved and never leak, answers that are read safely, and rewards."""

import ast
import re
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import not_refused

from lowmem_grpo.recipes import countdown
from lowmem_grpo.recipes.countdown import (
    LONGEST,
    Countdown,
    CountdownOptions,
    answer_line,
    countdowns,
    evaluate,
    given_numbers,
    make_dataset,
    reaches_target,
)

EASY = CountdownOptions(max_numbers=3, largest_number=20)
NUMBERS = [25, 3, 7]


def bounds(*values: Any) -> CountdownOptions:
    return CountdownOptions(**dict(zip(CountdownOptions.__annotations__, values, strict=False)))


def take(
    count: int, split: str = "train", seed: int = 0, difficulty: CountdownOptions | None = None
) -> list[Countdown]:
    source = countdowns(split, seed, difficulty)
    return [next(source) for _ in range(count)]


# puzzles


def test_every_puzzle_has_a_solution_of_positive_integers_within_its_difficulty() -> None:
    for difficulty in (CountdownOptions(), EASY, bounds(2, 6, 99, 999), CountdownOptions(operators="+-")):
        for puzzle in take(300, difficulty=difficulty):
            answer = evaluate(puzzle.solution)
            assert answer is not None and answer.value == puzzle.target, puzzle
            assert answer.numbers == Counter(puzzle.numbers), puzzle
            assert set(re.findall(r"[-+*/]", puzzle.solution)) <= set(difficulty.operators)
            steps = [node for node in ast.walk(ast.parse(puzzle.solution)) if isinstance(node, ast.BinOp)]
            results = [evaluate(ast.unparse(step)) for step in steps]
            assert len(steps) == len(puzzle.numbers) - 1
            assert all(one is not None and one.value.denominator == 1 and one.value > 0 for one in results)
            assert puzzle.target not in puzzle.numbers
            assert 1 <= puzzle.target <= difficulty.largest_target
            assert difficulty.min_numbers <= len(puzzle.numbers) <= difficulty.max_numbers
            assert all(1 <= number <= difficulty.largest_number for number in puzzle.numbers)


@pytest.mark.parametrize(("train_seed", "test_seed"), [(0, 0), (0, 1), (3407, 7)])
@pytest.mark.every(3)
def test_no_test_puzzle_is_trained_on_in_any_order_or_difficulty(train_seed: int, test_seed: int) -> None:
    train = {p.key for p in take(2000, "train", train_seed, EASY)} | {p.key for p in take(2000, "train", train_seed)}
    tested = {p.key for p in take(800, "test", test_seed, EASY)} | {p.key for p in take(800, "test", test_seed)}
    assert not train & tested
    assert len(tested) > 1500


def test_no_puzzle_comes_twice_in_any_order_and_every_operator_occurs_often() -> None:
    puzzles = take(1500)
    assert len({puzzle.key for puzzle in puzzles}) == 1500
    text = " ".join(puzzle.solution for puzzle in puzzles[:600])
    assert min(text.count(sign) for sign in "+-*/") > 30
    assert text.count("(") > 30


def test_a_difficulty_with_too_few_puzzles_or_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(countdown, "FRUITLESS", 2000)
    for split, difficulty, message in (
        ("train", bounds(2, 2, 4, 10), r"only \d+ different train problems; ask for fewer, .*largest_number=4"),
        ("train", bounds(6, 6, 50, 5, "+"), r"only 0 different train .*get=5, operators='\+': more or fewer"),
        ("test", bounds(2, 2, 4, 4, "*"), r"only 0 different test .*min_numbers=2.*a larger target"),
    ):
        with pytest.raises(ValueError, match=message):
            make_dataset(split, 5000, difficulty=difficulty)


def test_a_difficulty_that_makes_no_sense_is_refused() -> None:
    assert not_refused(lambda options: CountdownOptions(**options), [
        ({"min_numbers": 1}, "min_numbers is 1; it must be a whole number, from 2 to 6"),
        ({"max_numbers": 7}, "from 2 to 6"),
        ({"min_numbers": 4, "max_numbers": 3}, "min_numbers is 4, above max_numbers, which is 3"),
        ({"largest_number": 100}, "largest_number is 100; it must be a whole number, from 4 to 99"),
        ({"largest_target": 2}, "from 4 to 999"),
        ({"operators": ""}, "operators is ''"), ({"operators": "+^"}, "it must be some of +-*/"),
        ({"operators": "-/"}, "with + or *"),
    ]) == []


def test_the_dataset_has_its_columns_and_the_question_its_numbers() -> None:
    dataset = make_dataset("test", 20)
    assert dataset.column_names == ["prompt", "answer", "numbers", "target"]
    for row in dataset:
        (message,) = row["prompt"]
        target, *numbers = map(int, re.findall(r"\d+", message["content"]))
        assert (target, numbers) == (row["target"], row["numbers"])
        assert countdown.solves(f"Answer: {row['answer']}", row["numbers"], row["target"])


# answers


def test_an_expression_is_read_exactly() -> None:
    for text, value, numbers in (
        ("(25 - 7) * 3", 54, [25, 7, 3]), ("1", 1, [1]), ("7/2", Fraction(7, 2), [7, 2]), ("2 - 3", -1, [2, 3]),
        ("8 / (3 - 8 / 3)", 24, [8, 3, 8, 3]), (" ( ( 4 ) ) ", 4, [4]), ("0 * 5", 0, [0, 5]),
    ):
        answer = evaluate(text)
        assert answer is not None, text
        assert (answer.value, answer.numbers) == (value, Counter(numbers)), text


NO_EXPRESSIONS = [
    None, "", " ", "abc", "__import__('os')", "2 ** 9", "7 // 2", "7 % 2", "-3 + 5", "+3", "3(4)", "(1, 2)", "()",
    "1 +", "1 2", "1.5 + 2", "1e9", "0x10", "1_000", "007", "\u0661 + \u0662", "\uff11+1", "5 / 0", "5 / (3 - 3)",
    "1\n+ 2", "lambda: 1", "1 if 1 else 2", "3 = 3", "(" * 300 + "1" + ")" * 300, "(" * 59 + "1", "9" * 5000,
    "1+" * 4000 + "1", "1 <2", "\x00", "9" * (LONGEST + 1), "[1]", "~1", "1j", "1 and 2", "*3",
]


def test_other_text_than_a_short_expression_has_no_value_and_is_no_error() -> None:
    assert [text for text in NO_EXPRESSIONS if evaluate(text) is not None] == []


def test_the_deepest_and_the_longest_texts_are_read_and_of_longer_ones_nothing_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deep, long = "(" * 59 + "1" + ")" * 59, "1/" * 59 + "9"
    for text in (deep, long, "9" * LONGEST, "9*" * 59 + "9", "99999/" * 19 + "7"):
        assert len(text) <= LONGEST and evaluate(text) is not None
    monkeypatch.setattr(countdown.ast, "parse", lambda *text, **mode: pytest.fail("it is parsed"))
    for text in ("(" * (LONGEST + 1), "(" * 10**6, "Answer:" * 10**5, "1" * 10**7, "Answer: " + "(" * 10**6):
        assert evaluate(text) is None
        assert reaches_target([text], numbers=[NUMBERS], target=[54]) == [0.0]


@settings(deadline=None)
@given(st.text(alphabet="0123456789+-*/() \n\u00b2\u0663aA_.,=", max_size=140))
def test_no_strange_text_breaks_the_rewards(text: str) -> None:
    for completion in (text, f"Answer: {text}"):
        values = [reward([completion], numbers=[NUMBERS], target=[54])[0] for reward in countdown.REWARDS]
        assert values[0] in (0.0, 1.0) and set(values[1:]) <= {0.0, 0.1}


# rewards


EARNED = [  # by reaching the target, by the given numbers, and by the line of the answer
    ("25 - 7 = 18\n18 * 3 = 54\nAnswer: (25 - 7) * 3", 1.0, 0.1, 0.1), ("Answer: (25 - 7) * 3\n", 1.0, 0.1, 0.1),
    ("Answer: (25 - 7) * 3 = 54", 0.0, 0.0, 0.0), ("(25 - 7) * 3", 0.0, 0.0, 0.0), ("", 0.0, 0.0, 0.0),
    ("Answer: 54", 0.0, 0.0, 0.1), ("Answer: 27 * 2", 0.0, 0.0, 0.1), ("Answer: 25 + 7", 0.0, 0.1, 0.1),
    ("Answer: 25", 0.0, 0.0, 0.1), ("Answer: (25 - 7) * 3 * 1", 0.0, 0.0, 0.1), ("Answer: 25 - 7 * 3", 0.0, 0.1, 0.1),
    ("**Answer: (25 - 7) * 3**", 1.0, 0.1, 0.0), ("Answer: (25 - 7) * 3\nThat is it.", 1.0, 0.1, 0.0),
    ("Answer: (25 - 7) * 3\nAnswer: 25 + 7", 0.0, 0.1, 0.1), ("Answer: 3 * 3 * 3 + 3 * 3 * 3", 0.0, 0.0, 0.1),
    ("**Answer:** `(25 - 7) * 3`", 1.0, 0.1, 0.0), ("Answer: (25 \u2212 7) \u00d7 3", 1.0, 0.1, 0.0),
    ("Answer: 25 \u00f7 3", 0.0, 0.1, 0.0), ("Answer:", 0.0, 0.0, 0.0), ("Answer: 25 - 7 + 7", 0.0, 0.0, 0.1),
]


def test_a_completion_earns_what_it_deserves() -> None:
    told: dict[str, Any] = {"numbers": [NUMBERS], "target": [54], "prompts": [""], "trainer_state": None}
    rewards = reaches_target, given_numbers, answer_line
    for text, *earned in EARNED:
        for completion in (text, [{"role": "assistant", "content": text}]):
            assert [reward([completion], **told) for reward in rewards] == [[one] for one in earned], completion
    assert given_numbers(["Answer: 5 + 5", "Answer: 5 + 5 + 5"], numbers=[[5, 5, 1]] * 2) == [0.1, 0.0]
