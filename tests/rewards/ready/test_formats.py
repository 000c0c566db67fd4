"""The soft overlong penalty against TRL's, and against the numbers of the paper's equation."""

import random
from typing import Any

import pytest
from tables import every_row
from trl.rewards import get_soft_overlong_punishment

from lowmem_grpo.rewards import RewardScorer, soft_overlong_penalty


def completions(*lengths: int) -> list[list[int]]:
    return [[7] * length for length in lengths]


def test_the_numbers_of_the_equation_whatever_columns_there_are() -> None:
    penalty, ids = soft_overlong_penalty(100, 20), completions(0, 79, 80, 81, 90, 100, 130)
    assert penalty(completion_ids=ids, prompts=["p"] * 7, cache_length=[9] * 7) == [0, 0, 0, -0.05, -0.5, -1, -1]
    assert RewardScorer(penalty).names == ["soft_overlong_reward_func"]


@every_row("seed", range(5))
def test_every_length_is_punished_as_by_trl(seed: int) -> None:
    rng = random.Random(seed)
    longest = rng.randint(1, 500)
    cache = rng.randint(1, longest)
    lengths = completions(*(rng.randint(0, longest + 20) for _ in range(200)), longest - cache, longest)
    theirs = get_soft_overlong_punishment(longest, cache)(completion_ids=lengths)
    assert soft_overlong_penalty(longest, cache)(completion_ids=lengths) == theirs


@every_row(("longest", "cache", "message"), [
    (0, 1, "max_completion_length is 0"), (10, 0, "cache_length is 0"), (10, -3, "cache_length is -3"),
    (10, 11, r"cache_length is 11; it must be at most max_completion_length \(10\)"),
    (10, 2.5, "cache_length is 2.5"), (True, True, "max_completion_length is True"), ("10", 2, "is '10'"),
])
def test_arguments_that_make_no_sense_are_refused(longest: Any, cache: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        soft_overlong_penalty(longest, cache)
