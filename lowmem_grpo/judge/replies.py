"""From a judge's reply to scores, strictly: whatever is not exactly what was asked for is no score."""

import json
import math
import re
from typing import Any

THOUGHTS = re.compile(r"\A\s*+<think>.*?</think>", re.DOTALL)  # some servers leave a model's thinking in its reply
SHOWN = 80  # characters of a reply in messages


class BadReplyError(ValueError):
    """A reply that is not the scores that were asked for; the message says what is wrong with it."""


def read_single(reply: str, low: float, high: float) -> list[tuple[float, str]]:
    """[(score, reason)] of `{"score": ..., "reason": ...}`. BadReplyError for anything else."""
    return [rating_of(json_object(reply), low, high)]


def read_group(reply: str, count: int, low: float, high: float) -> list[tuple[float, str]]:
    """(score, reason) of answers 1 to `count` in order. BadReplyError unless each has exactly one, in range."""
    entries = json_object(reply).get("scores")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadReplyError('it has no list of objects under "scores"')
    found: dict[int, tuple[float, str]] = {}
    for entry in entries:
        name = id_of(entry.get("id"))
        if name is None or not 1 <= name <= count:
            raise BadReplyError(f"it scores an answer {entry.get('id')!r:.20}, and they are 1 to {count}")
        if name in found:
            raise BadReplyError(f"it scores answer {name} twice")
        found[name] = rating_of(entry, low, high)
    missing = [str(name) for name in range(1, count + 1) if name not in found]
    if missing:
        raise BadReplyError(f"it has no score for answer {', '.join(missing)}")
    return [found[name] for name in range(1, count + 1)]


def id_of(value: Any) -> int | None:
    """1 of 1 and of "1"; None of anything else."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,6}", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def rating_of(entry: dict[str, Any], low: float, high: float) -> tuple[float, str]:
    """(score, reason) of an object that has them; a reason may be missing."""
    score, reason = entry.get("score"), entry.get("reason")
    if isinstance(score, bool) or not isinstance(score, int | float) or not is_finite(score):
        raise BadReplyError(f'its "score" is {score!r:.40}, not a number')
    if not low <= score <= high:
        raise BadReplyError(f"its score {score!r:.20} is not within {low:g} to {high:g}")
    return float(score), reason if isinstance(reason, str) else ""


def is_finite(number: float) -> bool:
    """Whether it is a number that a float can hold."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def json_object(reply: str) -> dict[str, Any]:
    """The one JSON object of a reply; words before and after it are let pass, a second object is not."""
    text = THOUGHTS.sub("", reply)
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start:
        raise BadReplyError(f"it has no JSON object: {shown(reply)}")
    try:
        found = json.loads(text[start : end + 1], object_pairs_hook=distinct, parse_constant=no_constant)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadReplyError(f"it is not one JSON object: {shown(reply)}") from error
    except ValueError as error:  # an integer of thousands of digits, or one of ours
        raise error if isinstance(error, BadReplyError) else BadReplyError(f"it is no usable JSON: {error}") from error
    assert isinstance(found, dict)  # it begins with a brace
    return found


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different: of two scores neither is the one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BadReplyError("an object in it has the same key twice")
    return found


def no_constant(name: str) -> Any:
    raise BadReplyError(f"it has {name} in place of a number")


def shown(reply: str) -> str:
    """The beginning of a reply, for a message."""
    text = " ".join(reply[: 4 * SHOWN].split())
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...") if text else "it is empty"
