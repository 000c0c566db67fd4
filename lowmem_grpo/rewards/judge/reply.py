"""Strict reading of a judge's reply: a reply that is not in the requested form gives no score."""

import json
from typing import Annotated, Any

from pydantic import BaseModel, FailFast, Field, ValidationError

from lowmem_grpo.data.prompt_inputs import HALF
from lowmem_grpo.rewards.ready.reading import unfenced

Ratings = list[tuple[float, str]]  # (score, reason) of each answer of a question

SHOWN = 80  # characters of a reply that messages show
REASON = 2000  # characters of a reason that are kept


class BadReplyError(ValueError):
    """A reply without the required scores. The message quotes the reply's beginning. `fault` describes the problem
    without a quote: only `fault` is sent to the judge, since words of the reply may come from an answer."""

    def __init__(self, fault: str, reply: str) -> None:
        text = " ".join(reply[: 4 * SHOWN].split())
        said = repr(text if len(text) <= SHOWN else text[:SHOWN] + "...") if text else "it is empty"
        super().__init__(f"{fault}: {said}")
        self.fault = fault


class Rating(BaseModel):
    """The judge's verdict on one answer."""

    id: int = 1
    score: float = Field(strict=True, allow_inf_nan=False)
    reason: Any = ""


class GroupReply(BaseModel):
    """The judge's verdict on several answers."""

    scores: Annotated[list[Rating], FailFast()]


def read_reply(reply: str, count: int, low: float, high: float, grouped: bool) -> Ratings:
    """Return (score, reason) of answers 1 to `count`. BadReplyError unless each has exactly one score, in range."""
    said = json_object(reply)
    try:
        ratings = GroupReply.model_validate(said if grouped else {"scores": [said]}).scores
    except ValidationError as error:
        wrong = error.errors(include_input=False)[0]
        raise BadReplyError(f"it has no valid {'.'.join(map(str, wrong['loc']))} ({wrong['msg']})", reply) from None
    ratings.sort(key=lambda rating: rating.id)
    if [rating.id for rating in ratings] != [*range(1, count + 1)]:
        raise BadReplyError(f"its ids are not 1 to {count}, each once", reply)
    if not all(low <= rating.score <= high for rating in ratings):
        raise BadReplyError(f"a score in it is not within {low:g} to {high:g}", reply)
    return [(rating.score, HALF.sub("?", rating.reason[:REASON]) if isinstance(rating.reason, str) else "")
            for rating in ratings]


def json_object(reply: str) -> dict[str, Any]:
    """Return the one JSON object in a reply, after any thinking and inside any code fence. BadReplyError if there is
    any other text around it, because an object in such text may be a quote from an answer."""
    for said in (reply, reply.rpartition("</think>")[2]):  # the whole first, because a reason may mention the tag
        try:
            value = json.loads(unfenced(said, anywhere=False), object_pairs_hook=once_each)
        except (ValueError, RecursionError):  # also for an integer of thousands of digits
            continue
        if isinstance(value, dict):
            return value
    raise BadReplyError("it is not just one JSON object with each key once", reply)


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; ValueError if it has a key twice, such as two scores."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is in it twice")
    return value
