"""Verifiers of answers (the same text, the same number, a boxed answer, a pattern, JSON), and rewards for numbers."""

import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

from lowmem_grpo.rewards.reading import CLOCK, Finder, boxed, last_number, read_number, stated, unfenced, whole
from lowmem_grpo.rewards.ready.mathematics import Ask, equal, read_answer
from lowmem_grpo.rewards.reward import AMOUNT, TextReward, TextVerifier, Verdict, VerifiedReward
from lowmem_grpo.rewards.texts import label_text, labels_of
from lowmem_grpo.utils import POSITIVE, ZERO_OR_MORE, as_python, number, require

LONGEST_MATH = 300  # characters of an answer that is read as mathematics; a longer one is wrong
LONGEST_LABEL = 6  # words of a label; a longer label is a sentence, and not an answer
NUMERALS = {
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty", "thirty",
    "forty", "fifty", "sixty", "seventy", "eighty", "ninety", "hundred", "thousand", "million", "billion",
    "half", "minus",
}
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
LONGEST_ANSWER = 10_000  # characters of a completion that a user's pattern is matched against


def answer_match(column: str = "answer", where: Finder = whole, ignore_case: bool = False) -> TextVerifier:
    """Return a verifier: the answer's text equals the label, or the answer that the label states. White space at the
    ends is ignored, and any white space inside counts as one space. An empty label gives no verdict.

    `where` finds the answer: `whole` (default), `last_line`, `boxed`, `in_tag("answer")`, `after("####")`.
    """
    return TextVerifier("answer_match", same_text, column, where=where, ignore_case=ignore_case)


def same_text(text: str, label: Any, where: Finder, ignore_case: bool) -> Verdict:
    wanted, answer, written = (" ".join(str(value).split()) for value in (
        label_text(label), stated(label_text(label)), where(text) or ""))
    if not wanted:
        return None
    return written.casefold() in (wanted.casefold(), answer.casefold()) if ignore_case else written in (wanted, answer)


def number_match(column: str = "answer", where: Finder = last_number, tolerance: float = 0.0) -> TextVerifier:
    """Return a verifier: the answer, by default the last number of the completion, equals the label's number.

    "1,234.50", "$1234.5" and "1234.5" are equal. A label may state its answer, as GSM8K's do ("... #### 43", "The
    answer is 43."). `tolerance` is relative to the label. A label without a number gives no verdict. ValueError for a
    tolerance that is negative or infinite.
    """
    require("tolerance", tolerance, ZERO_OR_MORE, "; 0.01 is one per cent")
    return TextVerifier("number_match", same_number, column, where=where, tolerance=Fraction(as_python(tolerance)))


def same_number(text: str, label: Any, where: Finder, tolerance: Fraction) -> Verdict:
    wanted, written = labelled_number(label), where(text)
    if wanted is None:
        clock = stated(label) if isinstance(label, str) else ""
        return written == clock.strip() if CLOCK.fullmatch(clock.strip()) else None
    number = read_number(written)
    return number is not None and (number == wanted or abs(number - wanted) <= tolerance * abs(wanted))


def labelled_number(label: Any) -> Fraction | None:
    """Return the number of a label: the whole label, or the answer that it states; None if neither is a number."""
    number = read_number(label)
    return read_number(stated(label)) if number is None and isinstance(label, str) else number


def boxed_match(column: str = "answer") -> TextVerifier:
    r"""Return a verifier: the last \boxed{...} contains the label, as the same number or the same text.

    Spaces, dollar signs, \left and the like are ignored, and so is a unit that only one side has; lists may be in any
    order. The label may be boxed, or state its answer ("... #### 43", "The answer is 43."). If the label is a sentence
    or a number in words, an answer with another text gives no verdict. `math_match` also accepts x+1 for 1+x.
    """
    return TextVerifier("boxed_match", same_boxed, column)


def same_boxed(text: str, label: Any) -> Verdict:
    return same_answer(boxed(text), label, lambda wanted, answer: False)


def same_answer(answer: str | None, label: Any, ask: Ask) -> Verdict:
    """Return whether an answer equals the label; None for an empty label, and for a label in words that differs."""
    written = stated(label_text(label)) if label is not None else ""
    wanted = read_answer(written)
    if not wanted.tokens:
        return None
    right = answer is not None and len(answer) <= LONGEST_MATH and equal(wanted, read_answer(answer), ask)
    return None if not right and is_prose(written) else right


def is_prose(label: str) -> bool:
    """Return whether a label is a sentence, a number in words, or too long for an answer."""
    words = [word.lower() for word in re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", label))]
    numerals = {*words} - {"and"}
    in_words = bool(numerals) and numerals <= NUMERALS and not any(map(str.isdigit, label))
    return len(label) > LONGEST_MATH or len(words) > LONGEST_LABEL or in_words


def regex_match(pattern: str | re.Pattern[str], where: Finder = whole) -> TextVerifier:
    """Return a verifier: the whole answer matches the pattern (`re.fullmatch`).

    Only the first 10,000 characters of the completion are used. Avoid nested repeats such as (a+)+, for which Python's
    `re` can take exponential time. ValueError for an invalid pattern.
    """
    try:
        compiled = re.compile(pattern)
        compiled.match("")  # a TypeError for a pattern of bytes
    except (re.error, TypeError) as error:
        raise ValueError(f"regex_match got {pattern!r}, which is no regular expression: {error}") from error
    return TextVerifier("regex_match", fits, pattern=compiled, where=where)


def fits(text: str, pattern: re.Pattern[str], where: Finder) -> Verdict:
    answer = where(text[:LONGEST_ANSWER])
    return answer is not None and pattern.fullmatch(answer) is not None


def json_match(schema: dict[str, Any] | None = None) -> TextVerifier:
    """Return a verifier: the completion, or the last fenced block in it, is JSON that satisfies `schema` (None: any
    JSON object or list).

    NaN, infinity and numbers beyond a float's range are not JSON here. ValueError for an invalid schema, ImportError if
    a schema is given and the package jsonschema is not installed.
    """
    if schema is None:
        return TextVerifier("json_match", holds)
    if isinstance(schema, type):
        raise ValueError(f"json_match got the class {schema.__name__}; give its schema, as a dict: "
                         f"{schema.__name__}.model_json_schema() of pydantic")
    if find_spec("jsonschema") is None:
        raise ImportError("json_match with a schema needs the package jsonschema: pip install jsonschema")
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry, Resource
    from referencing.jsonschema import specification_with

    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"json_match got an invalid schema: {error.message}") from error
    validator = kind(schema, registry=Registry())  # which fetches nothing from the network
    values: list[Any] = [None, True, 0, "", [], {}]
    specification = specification_with(kind.META_SCHEMA["$schema"])
    for reference in references(Resource.from_contents(schema, default_specification=specification)):
        try:
            list(map(validator.evolve(schema=reference).is_valid, values))
        except Exception as error:
            raise ValueError(f"json_match got a schema whose {reference} leads to nothing in it, or back to itself "
                             "without end; put what it means into its \"$defs\", as nothing is fetched") from error
    return TextVerifier("json_match", holds, validator=validator)


def references(schema: Any) -> Iterator[dict[str, str]]:
    """Yield the references in a `Resource`'s schema, except those inside a subschema that has its own `$id`."""
    held = schema.contents if isinstance(schema.contents, dict) else {}
    yield from ({name: held[name]} for name in REFERENCES if isinstance(held.get(name), str))
    for part in schema.subresources():
        if part.id() is None:
            yield from references(part)


def holds(text: str, validator: Any = None) -> bool:
    """Return whether a text, or its last fenced block, is JSON that the validator accepts."""
    return any(is_valid(part, validator) for part in (text, unfenced(text, anywhere=True)))


def is_valid(text: str, validator: Any) -> bool:
    """Return whether a text is JSON that the validator accepts; without a validator, any JSON object or list."""
    try:
        value = json.loads(text, parse_float=finite, parse_constant=finite)
        return isinstance(value, (dict, list)) if validator is None else bool(validator.is_valid(value))
    except (ValueError, RecursionError):
        return False


def finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a finite number")
    return value


def number_present(present: float = 1.0, absent: float = -1.0, where: Finder = last_number) -> TextReward:
    """Return a reward: `present` if there is a number, by default anywhere in the completion, else `absent`."""
    return TextReward("number_present", pay_presence, where=where, present=present, absent=absent)


def pay_presence(text: str, where: Finder, present: float, absent: float) -> float:
    return present if read_number(where(text)) is not None else absent


def number_equal(
    right: float = 3.0, wrong: float = -3.0, column: str = "answer", where: Finder = last_number, tolerance: float = 0.0
) -> VerifiedReward:
    """Return the reward of `number_match`: `right` if the answer's number equals the label's, else `wrong`."""
    return number_match(column, where, tolerance).reward(right, wrong, "number_equal")


def proximity(
    exact: float = 3.0, outlier: float = -1.5, reach: float = 1.0, column: str = "answer", where: Finder = last_number
) -> TextReward:
    """Return a reward that grows with the nearness of the answer's number x to the label y:
    max(outlier, exact * (1 - |x - y| / (reach |y|))).

    With the defaults and y = 10, 9 earns 2.7 and 3 earns 0.9. Anything below -5 or above 25 earns -1.5, and so does an
    answer without a number. For y = 0 the distance is |x| / reach. A label without a number gives None. ValueError
    unless exact > outlier and reach > 0.
    """
    require("reach", reach, POSITIVE)
    require("outlier", outlier, AMOUNT)
    require("exact", exact, number(f"a finite number above outlier ({outlier})", lambda value: outlier < value))
    return TextReward("proximity", pay_nearness, column, where=where, exact=exact, outlier=outlier,
                      reach=Fraction(as_python(reach)))


def pay_nearness(text: str, label: Any, where: Finder, exact: float, outlier: float, reach: Fraction) -> float | None:
    labels = [wanted for each in labels_of(label) if (wanted := labelled_number(each)) is not None]
    if not labels:
        return None
    number = read_number(where(text))
    if number is None:
        return outlier
    distance = min(abs(number - wanted) / (reach * (abs(wanted) or 1)) for wanted in labels)
    return max(outlier, exact * (1 - float(min(distance, Fraction(10**6)))))
