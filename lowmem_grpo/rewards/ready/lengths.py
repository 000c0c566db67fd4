"""Rewards for length, in tokens, words or characters. `soft_overlong_penalty` is for the limit of the run itself."""

import functools
from collections.abc import Callable

from lowmem_grpo.rewards.reward import Reward, TextReward, TokenReward

UNITS: dict[str, Callable[[str], int]] = {"words": lambda text: len(text.split()), "characters": len}


def length_near(target: int, spread: int, unit: str = "tokens") -> Reward:
    """1 at `target`, less by 1 / spread for each `unit` away from it, 0 at `spread` and beyond."""
    whole_number("target", target, 0)
    whole_number("spread", spread, 1)
    return measured("length_near", functools.partial(pay_near, target=target, spread=spread), unit)


def pay_near(length: int, target: int, spread: int) -> float:
    return max(0.0, 1.0 - abs(length - target) / spread)


def too_long(longest: int, unit: str = "tokens", pay: float = -1.0) -> Reward:
    """`pay` for a completion of more than `longest` units, else 0."""
    whole_number("longest", longest, 0)
    return measured("too_long", functools.partial(pay_excess, longest=longest, pay=float(pay)), unit)


def pay_excess(length: int, longest: int, pay: float) -> float:
    return pay if length > longest else 0.0


def measured(name: str, rule: Callable[[int], float], unit: str) -> Reward:
    """A reward of the length in that unit. Raises ValueError for another."""
    if unit == "tokens":
        return TokenReward(name, functools.partial(of_tokens, rule=rule))
    if unit not in UNITS:
        raise ValueError(f"unit is {unit!r}; allowed are tokens, {', '.join(UNITS)}")
    return TextReward(name, functools.partial(of_text, rule=rule, unit=unit))


def of_tokens(ids: list[int], rule: Callable[[int], float]) -> float:
    return rule(len(ids))


def of_text(text: str, rule: Callable[[int], float], unit: str) -> float:
    return rule(UNITS[unit](text))


def whole_number(name: str, value: object, least: int) -> None:
    """Raises ValueError for anything but a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, at least {least}")
