"""Tables of cases: products of parameters that are pairwise, rows that are one test, and what is refused."""

import functools
import inspect
import itertools
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


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


def in_short_lane(test: str, number: int, step: int) -> bool:
    """Return whether the case of this number belongs to the short lane: one of each `step` cases, which one depends on
    the test's name, so that of a product no value is always left out."""
    block, place = divmod(number, step)
    return place == zlib.crc32(f"{test} {block}".encode()) % step


def every_row(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Return a decorator that tries a test on every row of a table, as one case, and names all rows that fail.

    `names` and `rows` are as in `pytest.mark.parametrize`. A row that needs a mark, or a folder that no other row has
    written into, needs that decorator.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [dict(zip(keys, row if len(keys) > 1 else [row], strict=True)) for row in rows]
    assert table, "a table without rows tries nothing"

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def of_all_rows(**fixtures: Any) -> None:
            failures: list[tuple[dict[str, Any], BaseException]] = []
            for row in table:
                try:
                    test(**row, **fixtures)
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - told below
                    failures.append((row, error))
            if failures:
                told = [f"{repr(row)[:400]}\n{error}" for row, error in failures]
                raise AssertionError(f"{len(told)} of {len(table)} rows:\n" + "\n\n".join(told)) from failures[0][1]

        signature = inspect.signature(test)
        kept = [one for name, one in signature.parameters.items() if name not in keys]
        of_all_rows.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return of_all_rows

    return decorate
