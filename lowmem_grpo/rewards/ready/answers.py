"""Verifiers of answers: the same text, the same number, a boxed answer, a pattern."""

import functools
import re
from fractions import Fraction
from typing import Any

from lowmem_grpo.rewards.ready.reading import CLOCK, Place, boxed, last_number, read_number, whole
from lowmem_grpo.rewards.verifier import LabelVerifier, TextVerifier, Verdict

LONGEST_ANSWER = 10_000  # characters of a completion that a user's pattern is matched against


def answer_match(column: str = "answer", where: Place = whole, ignore_case: bool = False) -> LabelVerifier:
    """The answer's text equals the label. White space at the ends does not count, and inside any of it counts as one
    space. An empty label gives no verdict.

    `where` finds the answer: `whole` (default), `last_line`, `boxed`, `in_tag("answer")`, `after("####")`.
    """
    return LabelVerifier("answer_match", functools.partial(same_text, where=where, ignore_case=ignore_case), column)


def same_text(text: str, label: Any, where: Place, ignore_case: bool) -> Verdict:
    wanted, found = (" ".join(str(value).split()) for value in (label, where(text) or ""))
    if not wanted:
        return None
    return found.casefold() == wanted.casefold() if ignore_case else found == wanted


def number_match(column: str = "answer", where: Place = last_number, tolerance: float = 0.0) -> LabelVerifier:
    """The answer, by default the last number of the completion, equals the label's number.

    "1,234.50", "$1234.5" and "1234.5" are equal. `tolerance` is relative to the label. A label that is not a number
    gives no verdict. Raises ValueError for a tolerance that is negative or infinite.
    """
    if not 0 <= tolerance < float("inf"):
        raise ValueError(f"tolerance is {tolerance!r}; it must be 0 or above; 0.01 is one per cent")
    judge = functools.partial(same_number, where=where, tolerance=Fraction(tolerance))
    return LabelVerifier("number_match", judge, column)


def same_number(text: str, label: Any, where: Place, tolerance: Fraction) -> Verdict:
    wanted, written = read_number(label), where(text)
    if wanted is None:
        return written == label.strip() if isinstance(label, str) and CLOCK.fullmatch(label.strip()) else None
    found = read_number(written)
    return found is not None and (found == wanted or abs(found - wanted) <= tolerance * abs(wanted))


def boxed_match(column: str = "answer") -> LabelVerifier:
    r"""The last \boxed{...} holds the label: the same number, or the same text apart from spaces, $ and \left.

    The label may be boxed itself. `math_match` also accepts 1/2 for \frac{1}{2}.
    """
    return LabelVerifier("boxed_match", same_boxed, column)


def same_boxed(text: str, label: Any) -> Verdict:
    wanted, found = plain_math(boxed(str(label)) or str(label)), boxed(text)
    if not wanted:
        return None
    return found is not None and same_plain(plain_math(found), wanted)


def same_plain(found: str, wanted: str) -> bool:
    """Whether two answers that `plain_math` has simplified are equal as numbers or as texts."""
    number = read_number(wanted)
    return found == wanted or (number is not None and read_number(found) == number)


def plain_math(answer: str) -> str:
    r"""An answer without spaces, dollar signs, \left, \right, \, \! and a full stop at its end; {,} becomes a comma."""
    bare = re.sub(r"\\left|\\right|\\[,!; ]|[\s$]", "", answer)
    return bare.replace("\\dfrac", "\\frac").replace("{,}", ",").rstrip(".")


def regex_match(pattern: str | re.Pattern[str], where: Place = whole) -> TextVerifier:
    """The whole answer matches the pattern (`re.fullmatch`).

    Only the first 10,000 characters of the completion are used. Avoid nested repeats such as (a+)+: Python's `re` can
    need longer for them than any run lasts. Raises ValueError for an invalid pattern.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"regex_match got {pattern!r}, which is no regular expression: {error}") from error
    return TextVerifier("regex_match", functools.partial(fits, pattern=compiled, where=where))


def fits(text: str, pattern: re.Pattern[str], where: Place) -> Verdict:
    found = where(text[:LONGEST_ANSWER])
    return found is not None and pattern.fullmatch(found) is not None
