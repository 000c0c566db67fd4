"""Tables of cases: products of parameters that are pairwise, and what is refused, held in one test."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def pairwise(allowed: Callable[..., bool] | None = None, /, **axes: Iterable[Any]) -> tuple[str, list[Any]]:
    """Return the names and cases for `pytest.mark.parametrize`: of every two axes, each pair of values is in some case.

    A value may be a `pytest.param`, whose marks go with its cases; pairs occur with and without them, so that what is
    skipped on a machine takes nothing away there. An axis of several arguments has their names with commas,
    `**{"device,shape": [("cpu", 3), ("cuda", 5)]}`. A case is left out where `allowed`, called with its values by
    name, is False; pairs that occur only there are not asked for.
    """
    values = [[as_param(name, value) for value in several] for name, several in axes.items()]
    names = ",".join(axes)
    cases = []
    for numbers in itertools.product(*(range(len(several)) for several in values)):
        parts = [several[number] for several, number in zip(values, numbers, strict=True)]
        marks = [mark for part in parts for mark in part.marks]
        case = pytest.param(*(value for part in parts for value in part.values), marks=marks)
        if allowed is None or allowed(**dict(zip(names.split(","), case.values, strict=True))):
            marked = tuple(mark.name for mark in marks)
            cases.append((case, {(marked, *pair) for pair in itertools.combinations(enumerate(numbers), 2)}))
    return names, list(covering(cases))


def as_param(name: str, value: Any) -> Any:
    """Return the value, or the values of an axis of several arguments, as a `pytest.param`."""
    if hasattr(value, "marks"):
        return value
    return pytest.param(*value) if "," in name else pytest.param(value)


def covering(cases: list[tuple[Any, set[Any]]]) -> Iterable[Any]:
    """Yield of (case, what occurs in it) few cases in which all occurs that occurs in any, the richest first."""
    left = set().union(*(pairs for _, pairs in cases))
    while left:
        case, pairs = max(cases, key=lambda one: len(one[1] & left))
        left -= pairs
        yield case


def not_refused(
    call: Callable[[Any], Any], rows: Iterable[tuple[Any, str | tuple[str, ...]]], error: type[Exception] = ValueError
) -> list[tuple[Any, str | tuple[str, ...], str]]:
    """Return of (given, words) each row whose `call(given)` does not raise `error` with these words (all of several),
    and what it said instead."""
    answers = [(given, words, answer(call, given, error)) for given, words in rows]
    return [(given, words, said) for given, words, said in answers
            if not all(part in said for part in ([words] if isinstance(words, str) else words))]


def answer(call: Callable[[Any], Any], given: Any, error: type[Exception]) -> str:
    """Return what the refusal says."""
    try:
        call(given)
    except error as refusal:
        return str(refusal)
    return "<accepted>"
