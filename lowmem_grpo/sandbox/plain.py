"""Encodes plain data as JSON that keeps Python's types, and compares an expected value with what came back.

None, bool, int, float, str and list stay as they are. Other types are an object with the type as its only key:
{"tuple": [...]}, {"set": [...]}, {"frozenset": [...]}, {"dict": [[key, value], ...]}, {"bytes": "6869"},
{"complex": [re, im]}, {"int": "0x..."} (over 1024 bits), {"iterator": [...]} (a generator, read to its end).
"""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

BIG_INT_BITS = 1024  # longer ones are written as hex: Python refuses to print very long ones as decimals
UNORDERED = ("set", "frozenset", "dict")
SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter}
SCALARS: dict[str, Callable[[Any], Any]] = {
    "bytes": bytes.fromhex, "int": lambda text: int(text, 16), "complex": lambda pair: complex(*pair),
}


def encode(value: Any) -> Any:
    """`value` as a JSON tree. Instances of subclasses become their base. TypeError for what is not plain data."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= BIG_INT_BITS else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for name, kind in (("tuple", tuple), ("set", set), ("frozenset", frozenset), ("iterator", Iterator)):
        if isinstance(value, kind):
            return {name: [encode(item) for item in value]}
    raise TypeError(f"a {type(value).__name__} is not plain data")


def decode(tree: Any) -> Any:
    """The value of a JSON tree that `encode` made. ValueError or TypeError for any other tree."""
    if isinstance(tree, list):
        return [decode(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1:
        raise ValueError(f"an object with {len(tree)} keys is not encoded data")
    ((name, content),) = tree.items()
    if name == "dict":
        return {decode(key): decode(item) for key, item in content}
    if name in SCALARS:
        return SCALARS[name](content)
    if name not in SEQUENCES:
        raise ValueError(f"{name!r} is no type of encoded data")
    return SEQUENCES[name]([decode(item) for item in content])


def same(expected: Any, got: Any) -> bool:
    """Whether two encoded trees stand for the same value.

    Types must be the same (1, 1.0 and True differ), except that a list equals a tuple: a dataset cannot hold tuples.
    Floats may differ by a billionth, and NaN equals NaN. Only the trees are compared: no foreign value is ever hashed.
    """
    expected, got = as_list(expected), as_list(got)
    if type(expected) is not type(got):
        return False
    if isinstance(expected, float):
        return math.isclose(expected, got, rel_tol=1e-9) or (math.isnan(expected) and math.isnan(got))
    if isinstance(expected, list):
        return len(expected) == len(got) and all(map(same, expected, got))
    if isinstance(expected, dict):
        ((name, content),) = expected.items()
        if list(got) != [name] or type(got[name]) is not type(content):
            return False
        other = got[name]
        return same(ordered(content), ordered(other)) if name in UNORDERED else same(content, other)
    return bool(expected == got)


def as_list(tree: Any) -> Any:
    """The items of an encoded tuple or iterator; anything else as it is."""
    if isinstance(tree, dict) and list(tree) in (["tuple"], ["iterator"]):
        return next(iter(tree.values()))
    return tree


def ordered(items: Any) -> Any:
    """A list of trees in an order that depends only on their content."""
    return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))
