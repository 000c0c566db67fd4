"""The strict reader of a judge's reply: a reply in any other form than the one that was asked for gives no score."""

import json
import sys
from typing import Any

from lowmem_grpo.rewards.ready.reading import FENCE, unfenced

Ratings = list[tuple[float, str]]  # (score, reason) of each answer of a question
Trouble = tuple[str, str, str]  # the kind, the problem and the fix, for the user

THOUGHT, THOUGHT_END = "<think>", "</think>"  # some servers leave a model's thinking in its reply
SHOWN = 80  # characters of a reply that messages show
REASON = 2000  # characters of a reason that are kept


class BadReplyError(ValueError):
    """A reply without the required scores. The message may quote the reply; `fault` describes the problem without a
    quote, and only that is sent to the judge, since words of the reply may come from an answer. `trouble` is what the
    user is told, if it is something else than that the judge babbles."""

    def __init__(self, fault: str, quoted: str = "", trouble: Trouble | None = None) -> None:
        super().__init__(f"{fault}: {quoted}" if quoted else fault)
        self.fault, self.trouble = fault, trouble


def read_group(reply: str, count: int, low: float, high: float) -> Ratings:
    """Return (score, reason) of answers 1 to `count`. BadReplyError unless each has exactly one score, in range."""
    entries = json_object(reply).get("scores")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadReplyError('it has no list of objects under "scores"')
    names = [str(number) for number in range(1, count + 1)]
    ratings: dict[str, tuple[float, str]] = {}
    for entry in entries:
        name = str(entry.get("id"))
        if name not in names:
            raise BadReplyError(f"it scores an answer that is none of 1 to {count}", f"{entry.get('id')!r:.20}")
        if name in ratings:
            raise BadReplyError(f"it scores answer {name} twice")
        ratings[name] = rating_of(entry, low, high)
    if missing := [name for name in names if name not in ratings]:
        raise BadReplyError(f"it has no score for answer {', '.join(missing)}")
    return [ratings[name] for name in names]


def rating_of(entry: dict[str, Any], low: float, high: float) -> tuple[float, str]:
    """Return (score, reason) of a JSON object; the reason may be missing, and is cut at REASON characters.
    BadReplyError unless the score is a number from `low` to `high`."""
    score, reason = entry.get("score"), entry.get("reason")
    if not isinstance(score, int | float) or isinstance(score, bool) or abs(score) > sys.float_info.max:
        raise BadReplyError('its "score" is not a number', f"{score!r:.40}")
    if not low <= score <= high:
        raise BadReplyError(f"its score {score!r:.20} is not within {low:g} to {high:g}")
    return float(score), writable(reason[:REASON]) if isinstance(reason, str) else ""


def json_object(reply: str) -> dict[str, Any]:
    """Return the one JSON object in a reply, after any thinking and inside any code fence. BadReplyError if there is
    any other text around it, because an object in such text may be a quote from an answer."""
    said = reply.rpartition(THOUGHT_END)[2]
    try:
        return object_alone(reply)  # first, because a reason may mention the think tags
    except BadReplyError as error:
        if THOUGHT in said and not said.lstrip().startswith(("{", FENCE)):
            raise BadReplyError("its thinking has no end", shown(reply)) from error
    return object_alone(said)


def object_alone(said: str) -> dict[str, Any]:
    """Return the JSON object that a text consists of, with or without a code fence; BadReplyError if it is not one."""
    text = unfenced(said, anywhere=False)
    if not text.startswith("{"):
        raise BadReplyError("it is not just one JSON object", shown(said))
    try:
        value = json.loads(text, object_pairs_hook=distinct, parse_constant=no_constant)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadReplyError("it is not just one JSON object", shown(said)) from error
    except ValueError as error:  # an integer of thousands of digits, or a BadReplyError
        raise error if isinstance(error, BadReplyError) else BadReplyError(f"it is no usable JSON: {error}") from error
    assert isinstance(value, dict)  # it begins with a brace
    return value


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's members; BadReplyError if a key occurs twice, since neither of two scores would count."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise BadReplyError("an object in it has the same key twice")
    return members


def no_constant(name: str) -> Any:
    raise BadReplyError(f"it has {name} in place of a number")


def shown(reply: str) -> str:
    text = " ".join(reply[: 4 * SHOWN].split())
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...") if text else "it is empty"


def writable(text: str) -> str:
    """Return the text with lone surrogates, which UTF-8 cannot encode, replaced by question marks."""
    return text.encode(errors="replace").decode()
