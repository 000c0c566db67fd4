"""What generated problems of all recipes have in common: none leaks, a seed repeats them, bad sizes are refused."""

import random
from collections.abc import Callable
from functools import partial

import pytest
from datasets import Dataset
from tables import not_refused

from lowmem_grpo.recipes import arithmetic, calculator, code, countdown, email, judge, proximity

MAKERS: dict[str, Callable[..., Dataset]] = {
    "arithmetic": arithmetic.make_dataset, "code": code.make_dataset, "countdown": countdown.make_dataset,
    "calculator": calculator.make_dataset, "email": email.make_dataset, "judge": judge.make_dataset,
    "proximity words": partial(proximity.make_dataset, task=proximity.WORDS),
    "proximity steps": partial(proximity.make_dataset, task=proximity.STEPS),
}
RECIPE = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def questions(dataset: Dataset) -> set[str]:
    return {prompt[-1]["content"] for prompt in dataset["prompt"]}


@RECIPE
@pytest.mark.every(2)
def test_problems_are_distinct_and_no_test_problem_is_trained_on(make: Callable[..., Dataset]) -> None:
    for train_seed, test_seed in ((0, 0), (3407, 7), (-1, 42)):
        train, test = questions(make("train", 1000, train_seed)), questions(make("test", 300, test_seed))
        assert (len(train), len(test)) == (1000, 300), (train_seed, test_seed)
        assert not train & test, (train_seed, test_seed)


@RECIPE
def test_a_seed_repeats_its_problems_and_leaves_the_global_random_state_alone(make: Callable[..., Dataset]) -> None:
    state = random.getstate()
    rows = make("train", 50, 1).to_list()
    assert make("train", 20, 1).to_list() == rows[:20]
    assert make("train", 50, 2).to_list() != rows
    assert random.getstate() == state


def test_a_split_or_size_that_makes_no_sense_is_refused() -> None:
    refused = {("validation", 5): '"train" and "test"', ("Train", 5): "split is 'Train'", ("test", -3): "at least 1",
               ("train", 0): "size is 0; it must be at least 1"}
    rows = [((name, *given), words) for name in MAKERS for given, words in refused.items()]
    rows.append((("code", "test", 5000), "different test problems; ask for fewer"))
    assert not_refused(lambda row: MAKERS[row[0]](*row[1:]), rows) == []
