"""Reads a judge's reply strictly: a reply that is not exactly what was asked for gives no score."""

import json
import math
import re
from typing import Any, TypeGuard

from lowmem_grpo.rewards.ready.reading import FENCE, unfenced

THOUGHT, THOUGHT_END = "<think>", "</think>"  # some servers leave a model's thinking in its reply
SHOWN = 80  # characters of a reply in messages
REASON = 2000  # characters of a reason that are kept


class BadReplyError(ValueError):
    """A reply that does not hold the scores that were asked for. The message says what is wrong with it.

    `fault` says it without quoting the reply, whose words may come from an answer. Only this is told to the judge.
    """

    def __init__(self, fault: str, quoted: str = "") -> None:
        super().__init__(f"{fault}: {quoted}" if quoted else fault)
        self.fault = fault


def read_single(reply: str, low: float, high: float) -> list[tuple[float, str]]:
    """[(score, reason)] of `{"score": ..., "reason": ...}`. BadReplyError for anything else."""
    return [rating_of(json_object(reply), low, high)]


def read_group(reply: str, count: int, low: float, high: float) -> list[tuple[float, str]]:
    """(score, reason) of answers 1 to `count` in order. BadReplyError unless each has exactly one score, in range."""
    entries = json_object(reply).get("scores")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadReplyError('it has no list of objects under "scores"')
    found: dict[int, tuple[float, str]] = {}
    for entry in entries:
        name = id_of(entry.get("id"))
        if name is None or not 1 <= name <= count:
            raise BadReplyError(f"it scores an answer that is none of 1 to {count}", f"{entry.get('id')!r:.20}")
        if name in found:
            raise BadReplyError(f"it scores answer {name} twice")
        found[name] = rating_of(entry, low, high)
    missing = [str(name) for name in range(1, count + 1) if name not in found]
    if missing:
        raise BadReplyError(f"it has no score for answer {', '.join(missing)}")
    return [found[name] for name in range(1, count + 1)]


def id_of(value: Any) -> int | None:
    """1 for 1 and for "1"; None for anything else."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,6}", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def rating_of(entry: dict[str, Any], low: float, high: float) -> tuple[float, str]:
    """(score, reason) of an object. The reason may be missing; a long one is cut."""
    score, reason = entry.get("score"), entry.get("reason")
    if not is_number(score):
        raise BadReplyError('its "score" is not a number', f"{score!r:.40}")
    if not low <= score <= high:
        raise BadReplyError(f"its score {score!r:.20} is not within {low:g} to {high:g}")
    return float(score), writable(reason[:REASON]) if isinstance(reason, str) else ""


def is_number(score: object) -> TypeGuard[float]:
    """Whether it is a number that a float can hold; True and False are none."""
    try:
        return isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)
    except OverflowError:
        return False


def json_object(reply: str) -> dict[str, Any]:
    """The one JSON object in a reply, after any thinking and inside any code fence. No other words may be around it,
    because an object among them may be a quote from an answer."""
    said = reply.rpartition(THOUGHT_END)[2]
    try:
        return object_alone(reply)  # first: a reason may speak of such tags
    except BadReplyError as error:
        if THOUGHT in said and not said.lstrip().startswith(("{", FENCE)):
            raise BadReplyError("its thinking has no end", shown(reply)) from error
    return object_alone(said)


def object_alone(said: str) -> dict[str, Any]:
    """The object of a text that holds nothing else."""
    text = unfenced(said, anywhere=False)
    if not text.startswith("{"):
        raise BadReplyError("it is not just one JSON object", shown(said))
    try:
        found = json.loads(text, object_pairs_hook=distinct, parse_constant=no_constant)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadReplyError("it is not just one JSON object", shown(said)) from error
    except ValueError as error:  # an integer of thousands of digits, or an error of ours
        raise error if isinstance(error, BadReplyError) else BadReplyError(f"it is no usable JSON: {error}") from error
    assert isinstance(found, dict)  # it begins with a brace
    return found


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different: with two scores, neither counts."""
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


def writable(text: str) -> str:
    """The text with a question mark for each lone half of a surrogate pair, which no request and no file can hold."""
    return text.encode(errors="replace").decode()
