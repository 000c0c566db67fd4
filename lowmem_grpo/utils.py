"""Text for bytes, seconds and counts; rules for the values of settings; JSON of strangers (`read_json`); and torch,
imported at first use."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from string import Formatter
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

MIB = 2**20
GIB = 2**30
UNIONS = (UnionType, Union)
Rule = tuple[str, Callable[[Any], bool]]  # (the requirement in words, the test of a value)


class LazyModule:
    """A module that is imported at first use. Importing torch takes seconds, so settings are checked before that."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        module = import_module(self._name)
        vars(self).update(vars(module))  # so that __getattr__ runs once
        return getattr(module, name)


if TYPE_CHECKING:  # a type checker sees the module itself
    import torch as torch
else:
    torch = LazyModule("torch")


def size_text(count: float) -> str:
    """Return bytes as text: 1.50 GiB, or 300.0 MiB below one GiB."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun: 1 step, 2,000 steps."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def time_text(seconds: float) -> str:
    """Return seconds as text: 0.031 s, 4.3 s, 42 s, 12 min 34 s, 1 h 2 min."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def is_number(value: Any) -> bool:
    """Return whether a value is a real number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def number(words: str, holds: Callable[[Any], bool]) -> Rule:
    """Return a rule, described by `words`, for numbers that satisfy `holds`."""
    return words, lambda value: is_number(value) and holds(value)


def at_least(least: int, kind: Any = Real) -> Rule:
    """Return a rule that allows whole numbers from `least` up. With the kind `Real`, 8.0 counts as whole."""
    return f"a whole number, at least {least}", lambda value: (
        isinstance(value, kind) and not isinstance(value, bool) and least <= value < math.inf and value % 1 == 0
    )


def within(least: int, most: int, kind: Any = Real) -> Rule:
    return f"a whole number, from {least} to {most:,}", lambda value: (
        at_least(least, kind)[1](value) and value <= most)


def up_to(most: int, kind: Any = Real) -> Rule:
    return within(1, most, kind)


def one_of(*allowed: Any) -> Rule:
    return f"one of {', '.join(map(str, allowed))}", lambda value: value in allowed


def from_number(least: float) -> Rule:
    return number(f"a finite number, at least {least}", lambda value: least <= value < math.inf)


def some_of(*allowed: str) -> Rule:
    """Return a rule for texts with names between commas; a name may be given without what is before its colon."""
    names = [name.rpartition(":")[2] for name in allowed]
    return f"some of {', '.join(names)}, with commas between them", lambda value: (
        all(word.strip() in names for word in value.split(",")))


def matching(words: str, pattern: str) -> Rule:
    return words, lambda value: re.fullmatch(pattern, value) is not None


NOT_NEGATIVE = number("0 or above", lambda value: value >= 0)  # infinity too
ZERO_OR_MORE = number("0 or above", lambda value: 0 <= value < math.inf)
POSITIVE = number("above 0", lambda value: 0 < value < math.inf)
SHARE = number("a share, from 0 to 1", lambda value: 0 <= value <= 1)
TEMPERATURE = number("0 (greedy), or 1e-6 or above", lambda value: value == 0 or 1e-6 <= value < math.inf)
DECAY = number("at least 0 and below 1", lambda value: 0 <= value < 1)
COUNT = at_least(1)
NUMBERS: Rule = ("a list of numbers", lambda value: isinstance(value, Iterable)
                 and all(is_number(each) for each in value))
FINITE: Rule = ("a list of finite numbers", lambda value: NUMBERS[1](value) and all(map(math.isfinite, value)))
TRUTH: Rule = ("True or False", lambda value: isinstance(value, bool))
PATH: Rule = ("a folder's name, which is not empty",
              lambda value: isinstance(value, str | os.PathLike) and bool(str(value).strip()))
WHOLE: Rule = ("a whole number", lambda value: isinstance(value, Integral) and not isinstance(value, bool))
SEED = number("a whole number, from -2**63 to 2**64 - 1, as torch takes",
              lambda value: WHOLE[1](value) and -(2**63) <= value < 2**64)
NUMBER_DICT: Rule = ("a dict of numbers", lambda value: isinstance(value, Mapping)
                     and all(is_number(each) for each in value.values()))
WHOLES: Rule = ("a whole number, or a list of them", lambda value: all(
    WHOLE[1](each) for each in (value if isinstance(value, list | tuple | range) else [value])))
PATTERN_NUMBERS: Rule = ("a dict of numbers, each by a name or a regular expression", lambda value:
                         NUMBER_DICT[1](value) and all(isinstance(key, str) and is_pattern(key) for key in value))
TEXTS: Rule = ("a text, or a list of texts", lambda value: isinstance(value, str) or (
    isinstance(value, list | tuple | set) and all(isinstance(each, str) for each in value)))
PATTERNS: Rule = ("a regular expression, or a list of texts", lambda value: TEXTS[1](value) and (
    not isinstance(value, str) or is_pattern(value)))
NAMES: Rule = ("a list of names", lambda value: not isinstance(value, str) and TEXTS[1](value))
ROWS: Rule = ("a list of whole numbers, or a dict of such lists by the names of modules", lambda value: all(
    isinstance(name, str) and isinstance(ids, list | tuple) and WHOLES[1](ids)
    for name, ids in (value.items() if isinstance(value, Mapping) else [("", value)])))
OF_KINDS: dict[Any, Rule] = {  # rules of fields without one in RANGES, by annotation
    bool: TRUTH, int: WHOLE, str: ("a text", lambda value: isinstance(value, str)),
    dict: ("a dict", lambda value: isinstance(value, Mapping)),
}
LONGEST = 10_000  # characters of a regular expression
TEXT: Rule = ("a text that is not empty", lambda value: isinstance(value, str) and bool(value.strip()))


def as_python(value: Any) -> Any:
    """Return the numbers and arrays of numpy and torch as Python's, which JSON can hold, within dicts and lists too."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if type(value) is dict:
        return {name: as_python(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(as_python, value))
    return value


def field_value(cls: Any, name: str, value: Any) -> Any:
    """Return the value of the dataclass field `name` with a type of Python instead of numpy or torch. In a field for
    whole numbers, 8.0 becomes 8."""
    value = as_python(value)
    return int(value) if isinstance(value, float) and value.is_integer() and name in whole_fields(cls) else value


@cache
def whole_fields(cls: Any) -> set[str]:
    """Return the names of a dataclass's fields for whole numbers."""
    return {name for name, hint in get_type_hints(cls).items() if kind_of(hint) is int}


def is_pattern(text: str) -> bool:
    """Return whether a text is a regular expression of at most LONGEST characters."""
    try:
        re.compile(text if len(text) <= LONGEST else "(")
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def require(name: str, value: object, rule: Rule, fix: str = "") -> None:
    """Raise ValueError, with `fix` appended to the message, if a value breaks a rule."""
    words, holds = rule
    if not holds(value):
        raise ValueError(f"{name} is {value!r:.500}; it must be {words}{fix}")


def check_given(values: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Raise ValueError for the first value that breaks its rule. None (an option not passed) breaks no rule."""
    for name, rule in rules.items():
        if values[name] is not None:
            require(name, values[name], rule)


def check_ranges(settings: Any, values: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError for the first field of a dataclass that breaks its rule in the RANGES of its class or bases.
    None is allowed if the field's annotation allows it. With `values` (by field name), `settings` is the class
    itself, and only these values are checked."""
    cls = settings.__class__ if values is None else settings
    for name, words, holds, optional in rules_of(cls):
        if values is not None and name not in values:
            continue
        value = getattr(settings, name) if values is None else values[name]
        if not (value is None and optional) and not holds(value):
            usual = getattr(cls, name, None)
            left_out = f"; leave it out for {usual!r}" if value is None and usual is not None else ""
            raise ValueError(
                f"{name} is {value!r}; it must be {words}{', or None' * optional}{of_yaml(value)}{left_out}")


def of_yaml(value: Any) -> str:
    """Return a hint for a number that YAML reads as text (1e-6 must be written as 1.0e-6), else an empty text."""
    read = re.search(r"'([-+]?\d+)(\.\d*)?e([-+]?)(\d+)'", repr(value).lower())
    return f". YAML reads it as text; write {read[1]}{read[2] or '.0'}e{read[3] or '+'}{read[4]}" if read else ""


def check_template(name: str, template: str, allowed: Iterable[str], needed: Iterable[str] = ()) -> None:
    """Raise ValueError if a template of `str.format` has a field that is not allowed, or lacks one that is needed."""
    fix = f"; its fields are {', '.join(f'{{{field}}}' for field in allowed)}. A brace that is text is written twice"
    try:
        parsed = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"{name} is {template!r:.80}, which is no template ({error}){fix}") from None
    fields = {f"{field}{f'!{how}' if how else ''}{f':{form}' if form else ''}" for _, field, form, how in parsed}
    if other := sorted(fields - {*allowed}):
        raise ValueError(f"{name} has the field {{{other[0]}}}{fix}")
    if missing := sorted({*needed} - fields):
        raise ValueError(f"{name} lacks the field {{{missing[0]}}}{fix}")


def check_value(cls: Any, name: str, value: Any) -> None:
    """Raise ValueError if this value would break the rule of a field of the dataclass `cls`."""
    check_ranges(cls, {name: value})


@cache
def rules_of(cls: Any) -> list[tuple[str, str, Callable[[Any], bool], bool]]:
    """Return (field, requirement in words, test, whether None is allowed) for each field of a class and its bases."""
    rules: dict[str, Rule] = {}
    for base in reversed(cls.__mro__):
        rules |= vars(base).get("RANGES", {})
    hints = get_type_hints(cls)
    optional = {name for name, hint in hints.items() if NoneType in get_args(hint)}
    plain = {name: OF_KINDS[kind] for name in getattr(cls, "__dataclass_fields__", ())
             if name not in rules and (kind := kind_of(hints[name])) in OF_KINDS}
    return [(name, *rule, name in optional) for name, rule in (rules | plain).items()]


def kind_of(hint: Any) -> Any:
    """Return the class that an annotation allows besides None, without type arguments; None if it allows several."""
    kinds = {get_origin(kind) or kind for kind in (get_args(hint) if get_origin(hint) in UNIONS else (hint,))}
    return (kinds - {NoneType}).pop() if len(kinds - {NoneType}) == 1 else None


class UnsupportedError(RuntimeError):
    """Raised for a feature of another library that is missing here; the message says what to use instead."""


def refuse_name(name: str, owner: str, table: Mapping[str, str]) -> None:
    """Raise UnsupportedError, with what to use instead, for a name that another library has and `owner` lacks."""
    if name in table:
        raise UnsupportedError(f"{owner} has no {name}. {table[name]}")


# control characters but tab and newline, halves of surrogate pairs, and marks that turn the direction of a text
UNSAFE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Return a text of a file or a model with a sign in place of what a terminal would obey instead of showing it."""
    return UNSAFE.sub("\ufffd", text)


DEEPEST = 64  # nesting of a stranger's JSON: templates, validators and Python's own json recurse over it
LARGEST = 2**64 - 1  # and -2**63 the least: what 64 bits hold, signed or not
SIMPLE: frozenset[type] = frozenset({int, float, bool, NoneType})
SUSPICIOUS = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")  # NUL or surrogates: in UTF-8 JSON they need an escape
NOT_TEXT = {False: re.compile("[\0\ud800-\udfff]"), True: re.compile("[\ud800-\udfff]")}  # by whether NUL is taken


class JsonError(ValueError):
    """A refused JSON. `field` is the place of the wrong value, such as `messages[0].content`; empty for the whole."""

    def __init__(self, why: str, place: tuple[str | int, ...] = ()) -> None:
        self.field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" if part.isidentifier()
                             and len(part) < 80 else f"[{part[:80]!r}]" for part in place).removeprefix(".")
        super().__init__(f"{self.field or 'the text'} {why}")


@dataclass(frozen=True)
class Refused:
    why: str  # it stands in a parsed value for what is wrong there, until the place is known


def read_json(data: bytes | str, most: float = 64 * MIB, nul: bool = False, any_number: bool = False) -> Any:
    """Parse a stranger's JSON text in UTF-8. JsonError for what is no JSON, for more than `most` bytes or characters
    or DEEPEST levels, a name that stands twice in an object, half of a surrogate pair, without `nul` the character NUL,
    and without `any_number` NaN, infinity and integers of more than 64 bits."""
    if len(data) > most:
        raise JsonError(f"has {size_text(len(data))}; at most {size_text(most)} are read")
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        integer, other = (None, None) if any_number else (json_integer, json_float)
        value = json.loads(text, parse_int=integer, parse_float=other, parse_constant=other,
                           object_pairs_hook=json_object)
    except RecursionError:
        raise JsonError(f"is nested more than {DEEPEST} levels deep") from None
    except ValueError as error:
        raise JsonError(f"is no JSON ({error})") from None
    check_json(value, nul, SIMPLE if isinstance(data, str) or SUSPICIOUS.search(text) else SIMPLE | {str})
    return value


def bytes_of(path: Path, most: float = 64 * MIB) -> bytes:
    """Return the bytes of a stranger's file, which `check_file` takes."""
    check_file(path, most)
    return path.read_bytes()


def check_file(path: Path, most: float = 64 * MIB) -> None:
    """Raise ValueError, without opening it, for what is no file (a pipe would be waited for) and for more than `most`
    bytes; OSError if there is nothing."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is a folder, a pipe or a device; a file is needed")
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{path} has {size_text(size)}; at most {size_text(most)} are read")


def json_integer(digits: str) -> int | Refused:
    if len(digits) <= 20 and -(2**63) <= (value := int(digits)) <= LARGEST:
        return value
    return Refused(f"is {digits[:24]}{'...' * (len(digits) > 24)}; a whole number must be -2**63 to 2**64 - 1")


def json_float(text: str) -> float | Refused:
    value = float(text)
    return value if math.isfinite(value) else Refused(f"is {text[:24]}, which is no finite number")


def json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Refused:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    return Refused(f"has the name {twice[:80]!r} twice; each name of an object may stand once")


def check_json(
    value: Any, nul: bool = False, harmless: frozenset[type] = SIMPLE, place: tuple[str | int, ...] = ()
) -> None:
    """Raise JsonError for what `read_json` refuses in a parsed value. Values of the types `harmless` are right."""
    if isinstance(value, Refused):
        raise JsonError(value.why, place)
    if isinstance(value, str) and (wrong := NOT_TEXT[nul].search(value)):
        raise JsonError(f"has {'the character NUL' if wrong[0] == chr(0) else 'half of a surrogate pair'} at character "
                        f"{wrong.start()}, which is no text; leave it out", place)
    if not isinstance(value, dict | list):
        return
    if len(place) >= DEEPEST:
        raise JsonError(f"is nested more than {DEEPEST} levels deep", place[:4])
    for name in value if isinstance(value, dict) and str not in harmless else ():
        check_json(name, nul, harmless, (*place, name))
    inner = value.values() if isinstance(value, dict) else value
    if not harmless >= set(map(type, inner)):
        for part, item in value.items() if isinstance(value, dict) else enumerate(value):
            if type(item) not in harmless:
                check_json(item, nul, harmless, (*place, part))


BOTH = ("{} holds a model's weights and an adapter (adapter_config.json), and nothing says whether the adapter belongs "
        "on this model, belongs on the base that it names, or is merged already. Move the adapter_* files into a "
        "folder of their own: load that folder for base and adapter, and this one for the model alone")


def leads_out(folder: Path, file: str) -> bool:
    """Return whether a file of weights lies outside of its folder, which may come from others. A link of the hub's
    cache leads to the files of the same model."""
    whole = folder.resolve()
    inside = whole.parent.parent if whole.parent.name == "snapshots" else whole
    return not (whole / file).resolve().is_relative_to(inside)


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter, with or without a config.json. UnsupportedError if it also holds the
    weights of a model."""
    if not (folder / "adapter_config.json").is_file():
        return False
    if any(not path.name.startswith("adapter_") for kind in ("*model*.safetensors", "*model*.bin")
           for path in folder.glob(kind)):
        raise UnsupportedError(BOTH.format(folder))
    return True


def is_gguf(name: Any) -> bool:
    """Return whether a path, or a name on the hub, is that of a GGUF file."""
    return str(name).lower().endswith(".gguf")
