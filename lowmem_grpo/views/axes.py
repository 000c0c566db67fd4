"""The axes of a chart: where one begins and ends, and its ticks, no two of which read the same."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MANTISSAS = (1, 2, 5, 10)  # ticks are multiples of these
TINY, HUGE = 1e-3, 1e6  # sizes outside are written with an exponent


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, with (value, label) of each tick in between."""

    low: float
    high: float
    ticks: list[tuple[float, str]]


def value_axis(values: Sequence[float], from_zero: bool = False, share: bool = False, count: int = 4) -> Axis:
    """An axis that holds these values and ends on ticks, about `count` of them. A share is in percent, from 0 to at
    most 100."""
    low, high = min(values), max(values)
    if from_zero or share:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:  # nothing to see but where it lies
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low) / 2, high + abs(high) / 2)
    step = nice((high - low) / count)
    if share:
        step = min(step, 0.25)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return made([place * step for place in range(first, last + 1)], step, share)


def step_axis(first: int, last: int, count: int = 5) -> Axis:
    """An axis of whole numbers from `first` to `last`."""
    step = max(1, round(nice(max(1, last - first) / count)))
    places = list(range(math.ceil(first / step), last // step + 1)) or [first]
    ticks = [(float(place * step), f"{place * step:,}") for place in places]
    return Axis(first - 0.5 if first == last else first, last + 0.5 if first == last else last, ticks)


def nice(step: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return power * next(mantissa for mantissa in MANTISSAS if mantissa * power >= step * (1 - 1e-9))


def made(values: list[float], step: float, share: bool) -> Axis:
    """The axis with these ticks, a label each."""
    return Axis(values[0], values[-1], list(zip(values, labels(values, step, share), strict=True)))


def labels(values: list[float], step: float, share: bool) -> list[str]:
    """The ticks in words, with as many digits as tell them apart."""
    if share:
        digits = decimals(100 * step)
        return [f"{100 * value + 0.0:.{digits}f}%" for value in values]
    largest = max(map(abs, values))
    if TINY <= largest < HUGE:
        return [plain(f"{value:,.{decimals(step)}f}") for value in values]
    power = math.floor(math.log10(largest))
    digits = max(0, power - math.floor(math.log10(step) + 1e-9))
    return ["0" if abs(value) < step / 2 else f"{value / 10.0**power:.{digits}f}e{power}" for value in values]


def decimals(step: float) -> int:
    """Digits after the point that a multiple of `step` needs."""
    return max(0, -math.floor(math.log10(step) + 1e-9))


def plain(label: str) -> str:
    """No minus before a zero."""
    return label.removeprefix("-") if not label.strip("-0.") else label
