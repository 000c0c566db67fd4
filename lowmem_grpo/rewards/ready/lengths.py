"""Rewards for length, in tokens, words or characters; a penalty near the run's own limit; a penalty on repetition."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from lowmem_grpo.rewards.reward import Reward, TextReward, TokenReward

UNITS: dict[str, Callable[[Any], int]] = {
    "tokens": len, "words": lambda text: len(text.split()), "characters": len}


def length_near(target: int, spread: int, unit: str = "tokens") -> Reward:
    """Return a reward of 1 at the length `target`, which falls linearly to 0 at `spread` units from it."""
    whole_number("target", target, 0)
    whole_number("spread", spread, 1)
    return measured("length_near", functools.partial(pay_near, target=target, spread=spread), unit)


def pay_near(length: int, target: int, spread: int) -> float:
    return max(0.0, 1.0 - abs(length - target) / spread)


def too_long(longest: int, unit: str = "tokens", pay: float = -1.0) -> Reward:
    """Return a reward that pays `pay` for a completion of more than `longest` units, else 0."""
    whole_number("longest", longest, 0)
    return measured("too_long", functools.partial(pay_excess, longest=longest, pay=float(pay)), unit)


def pay_excess(length: int, longest: int, pay: float) -> float:
    return pay if length > longest else 0.0


def measured(name: str, rule: Callable[[int], float], unit: str) -> Reward:
    """Return a reward that applies `rule` to the length in this unit. ValueError for an unknown unit."""
    if unit not in UNITS:
        raise ValueError(f"unit is {unit!r}; allowed are {', '.join(UNITS)}")
    return (TokenReward if unit == "tokens" else TextReward)(name, functools.partial(pay_length, rule=rule, unit=unit))


def pay_length(completion: Any, rule: Callable[[int], float], unit: str) -> float:
    return rule(UNITS[unit](completion))


def soft_overlong_penalty(max_completion_length: int, cache_length: int) -> Callable[..., list[float]]:
    """Return a reward function that penalises only length (DAPO, arXiv 2503.14476, equation 13). For C tokens:

        0                                    C <= max_completion_length - cache_length
        (max - cache - C) / cache            up to max_completion_length: from 0 down to -1
        -1                                   above

    Add it to `reward_funcs` with the run's own `max_completion_length`: a truncated completion then gets -1. It is
    added to the other rewards with its weight in `reward_weights`. ValueError unless
    1 <= cache_length <= max_completion_length.
    """
    whole_number("max_completion_length", max_completion_length, 1)
    whole_number("cache_length", cache_length, 1)
    if cache_length > max_completion_length:
        raise ValueError(f"cache_length is {cache_length}; it must be at most max_completion_length "
                         f"({max_completion_length}), a fifth of it is usual")
    free = max_completion_length - cache_length

    def soft_overlong_reward_func(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        over = [min(max(len(ids) - free, 0), cache_length) for ids in completion_ids]
        return [-tokens / cache_length if tokens else 0.0 for tokens in over]

    return soft_overlong_reward_func


def repetition_penalty(ngram: int = 4, worst: float = -1.0) -> TokenReward:
    """Return a reward: `worst` times the share of a completion's token n-grams that repeat an earlier one (arXiv
    2502.03373).

    It is 0 if no n-gram repeats, or with fewer than `ngram` tokens. ValueError for a positive `worst`.
    """
    whole_number("ngram", ngram, 1)
    if not worst <= 0:
        raise ValueError(f"worst is {worst!r}; a penalty is 0 or below")
    return TokenReward("repetition_penalty", functools.partial(pay_repetition, ngram=ngram, worst=worst))


def pay_repetition(ids: list[int], ngram: int, worst: float) -> float:
    count = len(ids) - ngram + 1
    if count < 1:
        return 0.0
    different = len(set(zip(*(ids[start : start + count] for start in range(ngram)), strict=True)))
    return worst * (1 - different / count) if different < count else 0.0


def whole_number(name: str, value: object, least: int) -> None:
    """Raise ValueError unless `value` is an int of at least `least`, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, at least {least}")
