"""The soft overlong penalty against TRL's."""

import random
from typing import Any

import pytest
from tables import every_row
from trl.rewards import get_soft_overlong_punishment

from lowmem_grpo.rewards import soft_overlong_penalty


@every_row("seed", range(5))
def test_every_length_is_punished_as_by_trl(seed: int) -> None:
    rng = random.Random(seed)
    longest = rng.randint(1, 500)
    cache = rng.randint(1, longest)
    lengths = [*(rng.randint(0, longest + 20) for _ in range(200)), longest - cache, longest]
    ids = [[7] * length for length in lengths]
    theirs = get_soft_overlong_punishment(longest, cache)(completion_ids=ids)
    assert soft_overlong_penalty(longest, cache)(completion_ids=ids, cache_length=[9] * 202) == theirs


@every_row(("longest", "cache", "message"), [
    (0, 1, "max_completion_length is 0"), (10, 0, "cache_length is 0"), (10, -3, "cache_length is -3"),
    (10, 11, r"cache_length is 11; it must be at most max_completion_length \(10\)"),
    (10, 2.5, "cache_length is 2.5"), (True, True, "max_completion_length is True"), ("10", 2, "is '10'"),
])
def test_arguments_that_make_no_sense_are_refused(longest: Any, cache: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        soft_overlong_penalty(longest, cache)
