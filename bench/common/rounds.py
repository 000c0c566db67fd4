"""Run cases in turn, so that other load on the machine disturbs all of them alike."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TypeVar

T = TypeVar("T")


def in_turn(cases: Sequence[T], rounds: int, warm_up: int = 0) -> Iterator[tuple[T, bool]]:
    """Yield (case, whether it counts): every case once per round, in reversed order in every second round; the first
    `warm_up` rounds do not count."""
    for number in range(rounds + warm_up):
        for case in reversed(cases) if number % 2 else cases:
            yield case, number >= warm_up


def ratio(own: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over rounds of a case's seconds divided by those of the baseline."""
    return round(median(mine / theirs for mine, theirs in zip(own, base, strict=True)), 4)
