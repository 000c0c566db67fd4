"""The base class of judges, with a cache, a meter and rate-limited warnings."""

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import urlsplit

from lowmem_grpo.rewards.judge.question import Question, Ratings
from lowmem_grpo.runs.findings import Finding
from lowmem_grpo.utils import at_least, require

logger = logging.getLogger(__name__)

GONE = {"cache_file": "what was judged is kept as long as the judge; leave it out"} | dict.fromkeys(
    ("price_prompt", "price_completion"), "multiply the counts of tokens in judge.meter by your prices")
QUIET_SECONDS = 300.0  # between two warnings of the same kind
LOCK = threading.Lock()  # guards the records of warnings


@dataclass
class Meter:
    """The cost of judging: counts of a judge since it was made, or of one call."""

    calls: int = 0  # questions that were asked; a retry does not count again
    cached: int = 0  # questions answered from the cache
    retried: int = 0  # further requests for a question: after an error, or after a reply without scores
    failed: int = 0  # questions without an answer
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, other: "Meter") -> None:
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))


@dataclass
class Round:
    """One call of a judge with some questions: the ratings, their cost, and the failures."""

    questions: list[Question]
    found: dict[Question, Ratings] = field(default_factory=dict)
    known: set[Question] = field(default_factory=set)  # questions answered from the cache
    meter: Meter = field(default_factory=Meter)
    troubles: list[Finding] = field(default_factory=list)

    @property
    def ratings(self) -> list[Ratings | None]:
        """The ratings of each question in order; None for a question without an answer."""
        return [self.found.get(question) for question in self.questions]


class Judge:
    """The base of judges, whose method `rate(questions) -> Round` may be async and raises no error for a failure."""

    after_sampling = False  # `rate` uses the rollout engine
    time_limit: float  # seconds within which `rate` returns
    rate: Any  # defined by each judge

    def __init__(self, name: str, cache_size: int) -> None:
        """`cache_size` is the number of questions whose ratings are kept. ValueError if it is negative."""
        require("cache_size", cache_size, at_least(0))
        self.name, self.cache_size = name, cache_size
        self.cache: OrderedDict[str, Ratings] = OrderedDict()
        self.meter = Meter()
        self.complaints = Complaints()

    def begin(self, questions: list[Question]) -> tuple[Round, list[Question]]:
        """Return a round with the ratings found in the cache, and the distinct questions that must be asked."""
        now = Round(questions)
        waiting: list[Question] = []
        for question in dict.fromkeys(questions):
            if (ratings := self.cache.get(question.key)) is None:
                waiting.append(question)
            else:
                now.found[question] = ratings
        now.known = set(now.found)
        now.meter.cached, now.meter.calls = len(now.found), len(waiting)
        return now, waiting

    def learn(self, now: Round, question: Question, ratings: Ratings) -> None:
        """Store a question's ratings in the round and in the cache."""
        now.found[question] = self.cache[question.key] = ratings
        while len(self.cache) > self.cache_size:
            self.cache.popitem(last=False)

    def end(self, now: Round) -> Round:
        """Count the failed questions, add the round to the meter, warn of its troubles, and return it."""
        now.meter.failed = sum(question not in now.found for question in dict.fromkeys(now.questions))
        self.meter.add(now.meter)
        for trouble in {trouble.kind: trouble for trouble in now.troubles}.values():
            self.complaints.say(self.name, trouble)
        return now

    def summary(self) -> str:
        """Return the cost of judging so far, in one line."""
        meter = self.meter
        return (f"judge {self.name}: {meter.calls:,} calls ({meter.cached:,} more from the cache), {meter.retried:,} "
                f"retried, {meter.failed:,} failed; {meter.prompt_tokens:,} prompt and {meter.completion_tokens:,} "
                f"completion tokens")


def unanswered(kind: str, problem: str, fix: str) -> Finding:
    """Return the finding that a question has no answer for this reason."""
    return Finding("warning", "", problem, fix, kind)


class Complaints:
    """Warns of each kind of trouble at most once per `quiet_seconds`; a later warning counts the suppressed ones."""

    def __init__(self, quiet_seconds: float = QUIET_SECONDS) -> None:
        self.quiet_seconds = quiet_seconds
        self.said: dict[str, float] = {}  # time of the last warning, by kind
        self.unsaid: dict[str, int] = {}  # suppressed warnings since then, by kind

    def say(self, judge: str, trouble: Finding) -> None:
        with LOCK:
            now, before = time.monotonic(), self.said.get(trouble.kind)
            if before is not None and now - before < self.quiet_seconds:
                self.unsaid[trouble.kind] = self.unsaid.get(trouble.kind, 0) + 1
                return
            self.said[trouble.kind], more = now, self.unsaid.pop(trouble.kind, 0)
        often = f" ({more} more times since this was last said)" if more else ""
        problem = f"{trouble.problem}{often}; those completions have no reward"
        logger.warning("%s", replace(trouble, about=f"judge {judge}", problem=problem))

    def __getstate__(self) -> dict[str, Any]:
        return {"quiet_seconds": self.quiet_seconds, "said": {}, "unsaid": {}}


def check_gone(options: dict[str, Any]) -> None:
    """Raise TypeError, with what to do instead, for an option that is unknown or was removed."""
    for name in options:
        raise TypeError(f"a judge has no option {name!r}: {GONE.get(name, 'see docs/judge.md for its options')}")


def is_address(url: str) -> bool:
    """Return whether `url` is a server's URL: http or https, with a host and a valid port, if any."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
