"""Plain data as it crosses the border of the sandbox: encoded, decoded, compared."""

import json
from typing import Any

import pytest
from tables import every_row

from lowmem_grpo.rewards.sandbox.plain import decode, encode, same


@every_row(("expected", "got", "equal"), [
    (1, 1, True), (1, 1.0, False), (1, True, False), (0, False, False), (0.1 + 0.2, 0.3, True), (0.3, 0.31, False),
    (float("nan"), float("nan"), True), (float("inf"), float("inf"), True), ([1, 2], (1, 2), True),
    ([1, 2], [2, 1], False),
    ({1, 2}, {2, 1}, True), ({1, 2}, frozenset({1, 2}), False), ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
    ({"a": 1}, {"a": 1.0}, False), ({1: "x"}, {"1": "x"}, False), (None, 0, False), ("5", 5, False), (b"x", "x", False),
    (10**500, 10**500, True), (10**500, 10**500 + 1, False), ([[1], [2.0]], [(1,), [2.0 + 1e-13]], True),
    ([1, 2], {1, 2}, False), ({}, [], False), ("", [], False), (1j, 1j, True), ([1], [1, 1], False),
])
def test_values_are_compared_by_type_and_content(expected: Any, got: Any, equal: bool) -> None:
    trees = [json.loads(json.dumps(encode(value))) for value in (expected, got)]
    assert same(*trees) is equal
    for value, tree in zip((expected, got), trees, strict=True):
        again = decode(tree)
        assert type(again) is type(value) and (again == value or again != again)


@every_row("tree", [{"dict": 1}, {"what": []}, {"set": [[]]}, {"a": 1, "b": 2}, {"int": "x"}, {}, {"Fraction": "1e5"}])
def test_what_is_no_encoded_data_is_refused(tree: Any) -> None:
    """An exponent would be written out: 1e999999999 takes all the memory of the process that reads it."""
    with pytest.raises((ValueError, TypeError)):
        decode(tree)


def test_trees_are_compared_without_a_hash_of_their_keys() -> None:
    """Keys that collide make many comparisons in a set; as items of a list they make none."""
    class Unhashable(int):
        __hash__ = None  # type: ignore[assignment]

    tree = {"set": [Unhashable(1), Unhashable(2)]}
    assert not same("x", tree) and not same({"set": [1]}, tree) and same({"set": [Unhashable(2), Unhashable(1)]}, tree)
    with pytest.raises(TypeError, match="unhashable"):
        decode(tree)
