"""Rewards for numbers: for any number, for the right one, for one that is near."""

import functools
from fractions import Fraction
from typing import Any

from lowmem_grpo.rewards.ready.answers import labelled_number, number_match
from lowmem_grpo.rewards.ready.reading import Place, last_number, read_number
from lowmem_grpo.rewards.reward import LabelReward, TextReward
from lowmem_grpo.rewards.verifier import VerifiedReward


def number_present(present: float = 1.0, absent: float = -1.0, where: Place = last_number) -> TextReward:
    """`present` if there is a number, by default anywhere in the completion, else `absent`."""
    return TextReward("number_present", functools.partial(pay_presence, where=where, amounts=(present, absent)))


def pay_presence(text: str, where: Place, amounts: tuple[float, float]) -> float:
    return amounts[0] if read_number(where(text)) is not None else amounts[1]


def number_equal(
    right: float = 3.0, wrong: float = -3.0, column: str = "answer", where: Place = last_number, tolerance: float = 0.0
) -> VerifiedReward:
    """`right` if the answer's number equals the label's, else `wrong`: `number_match` with amounts."""
    return number_match(column, where, tolerance).reward(right, wrong, "number_equal")


def proximity(
    exact: float = 3.0, outlier: float = -1.5, reach: float = 1.0, column: str = "answer", where: Place = last_number
) -> LabelReward:
    """A number x earns more the nearer it is to the label y: max(outlier, exact * (1 - |x - y| / (reach |y|))).

    With the defaults and y = 10, 9 earns 2.7 and 3 earns 0.9. Anything below -5 or above 25 earns -1.5, and so does an
    answer without a number. For y = 0 the distance is |x| / reach. A label that is not a number gives None. Raises
    ValueError unless exact > outlier and reach > 0.
    """
    if not exact > outlier or not reach > 0:
        raise ValueError(f"exact is {exact}, outlier {outlier}, reach {reach}; needed: exact > outlier, reach > 0")
    rule = functools.partial(pay_nearness, where=where, exact=exact, outlier=outlier, reach=Fraction(reach))
    return LabelReward("proximity", rule, column)


def pay_nearness(text: str, label: Any, where: Place, exact: float, outlier: float, reach: Fraction) -> float | None:
    wanted = labelled_number(label)
    if wanted is None:
        return None
    found = read_number(where(text))
    if found is None:
        return outlier
    distance = abs(found - wanted) / (reach * (abs(wanted) or 1))
    return max(outlier, exact * (1 - float(min(distance, Fraction(10**6)))))
