"""JSON for plain data that keeps Python's types, and the comparison of an expected value with a returned one.

None, bool, int, float, str and list are unchanged. Other types become an object with the type as its only key:
{"tuple": [...]}, {"dict": [[key, value], ...]}, {"bytes": "6869"}, {"int": "0x..."} (over 1024 bits), {"iterator":
[...]} (a generator, read to its end), and those in FORMS. Other values are encoded by `refer`, or are an error.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from json import dumps
from typing import Any

BIG_INT_BITS = 1024  # longer integers are written as hex: Python refuses to print very long ones as decimals
UNORDERED = ("set", "frozenset", "dict", "Counter")
LISTS = ("tuple", "iterator", "deque", "range")  # equal to a list of the same items, since datasets hold only lists
MOST_STEPS = 100_000  # in a range that is compared with a list
WRITTEN_BY_CODE = ("solution", "tests")  # modules whose classes are not plain data, even if they subclass list etc.
Function = Callable[[Any], Any]
FORMS: dict[str, tuple[Any, Function, Function]] = {  # by name: the class, its parts as simpler data, and the way back
    "tuple": (tuple, list, tuple), "set": (set, list, set), "frozenset": (frozenset, list, frozenset),
    "Counter": (Counter, lambda counts: [*map(list, counts.items())], lambda pairs: Counter(dict(pairs))),
    "dict": (dict, lambda entries: [*map(list, entries.items())], dict),
    "bytes": (bytes | bytearray, lambda value: value.hex(), bytes.fromhex),
    "complex": (complex, lambda value: [value.real, value.imag], lambda pair: complex(*pair)),
    "deque": (deque, lambda items: [list(items), items.maxlen], lambda parts: deque(*parts)),
    "range": (range, lambda steps: [steps.start, steps.stop, steps.step], lambda ends: range(*ends)),
    "Fraction": (Fraction, str, lambda text: Fraction(*map(int, text.split("/")))), "Decimal": (Decimal, str, Decimal),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),  # which is a date too
    "date": (date, date.isoformat, date.fromisoformat), "time": (time, time.isoformat, time.fromisoformat),
    "timedelta": (timedelta, lambda span: [span.days, span.seconds, span.microseconds], lambda of: timedelta(*of)),
}
BACK: dict[str, Function] = {
    "int": lambda text: int(text, 16), "iterator": iter, **{name: back for name, (_, _, back) in FORMS.items()}}


def encode(value: Any, refer: Function | None = None) -> Any:
    """Return `value` as a JSON tree. `refer` encodes values that are not plain data. Without it, instances of
    subclasses become their base type, iterators are read to their end, and other values are a TypeError."""
    if refer is not None and type(value).__module__ in WRITTEN_BY_CODE:
        return refer(value)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= BIG_INT_BITS else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [encode(item, refer) for item in value]
    for name, (kind, parts, _) in FORMS.items():
        if isinstance(value, kind):
            return {name: encode(parts(value), refer)}
    if refer is not None:
        return refer(value)
    if isinstance(value, Iterator):
        return {"iterator": encode(list(value))}
    raise TypeError(f"a {type(value).__name__} is not plain data")


def decode(tree: Any, referred: Function | None = None) -> Any:
    """Return the value of a JSON tree that `encode` made; `referred` decodes the trees made by `refer`. ValueError or
    TypeError for any other tree."""
    if isinstance(tree, list):
        return [decode(item, referred) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1:
        raise ValueError(f"an object with {len(tree)} keys is not encoded data")
    ((name, content),) = tree.items()
    if name in BACK:
        return BACK[name](decode(content, referred))
    if referred is None:
        raise ValueError(f"{name!r} is not a type of encoded data")
    return referred(tree)


def same(expected: Any, got: Any, json: bool = False) -> bool:
    """Return whether two encoded trees stand for the same value. Types must be the same (1, 1.0 and True differ),
    except that a list equals other sequences, such as tuples. Floats may differ by a relative 1e-9; NaN equals NaN.
    With `json`, the expected value was written as JSON: numbers compare as in Python, and keys as JSON writes them."""
    expected, got = as_list(expected), as_list(got)
    if json:
        expected, got = as_number(expected), as_number(got)
    if json and {type(expected), type(got)} == {int, float}:
        return math.isclose(expected, got, rel_tol=1e-9)
    if type(expected) is not type(got):
        return False
    if isinstance(expected, float):
        return math.isclose(expected, got, rel_tol=1e-9) or (math.isnan(expected) and math.isnan(got))
    if isinstance(expected, list):
        return len(expected) == len(got) and all(same(*pair, json) for pair in zip(expected, got, strict=True))
    if isinstance(expected, dict):
        (((name, content),), ((other_name, other),)) = expected.items(), got.items()
        names = {name, other_name} if json else {name} if name == other_name else set()
        if names and names <= {"dict", "Counter"} and isinstance(other, list):
            return same(ordered(content, json), ordered(other, json), json)
        if name != other_name or type(other) is not type(content):
            return False
        return same(ordered(content), ordered(other), json) if name in UNORDERED else same(content, other, json)
    return bool(expected == got)


def as_list(tree: Any) -> Any:
    """Return the items of an encoded sequence as a list; any other tree unchanged."""
    if not isinstance(tree, dict) or len(tree) != 1 or next(iter(tree)) not in LISTS:
        return tree
    ((name, content),) = tree.items()
    if name == "range":
        return list(decode(tree)) if len(decode(tree)) <= MOST_STEPS else tree
    return content[0] if name == "deque" else content


def as_number(tree: Any) -> Any:
    """Return an encoded number as an int if it is whole, else as a float; any other tree unchanged."""
    if isinstance(tree, dict) and list(tree) in (["Fraction"], ["Decimal"]):
        tree = float(decode(tree))
    return int(tree) if isinstance(tree, bool) or (isinstance(tree, float) and tree.is_integer()) else tree


def ordered(items: Any, json: bool = False) -> Any:
    """Return JSON trees sorted by content; with `json`, [key, value] pairs with keys as JSON writes them."""
    if json:
        items = [[key if isinstance(key, str | dict | list) else dumps(key), item] for key, item in items]
    return sorted(items, key=lambda item: dumps(item, sort_keys=True))
