"""Share a name, a cache, a meter and warnings between both judges."""

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
LOCK = threading.Lock()  # guards what judges have warned of


@dataclass
class Meter:
    """The cost of judging: counts of a judge since it was made, or of one call."""

    calls: int = 0  # questions put to the judge; one that is asked again counts once
    cached: int = 0  # questions whose answer was known already
    retried: int = 0  # further requests for a question: after an error, or after a reply without scores
    failed: int = 0  # questions that have no answer
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, other: "Meter") -> None:
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))


@dataclass
class Round:
    """One call of a judge with some questions: the ratings, what they took, and what went wrong."""

    questions: list[Question]
    found: dict[Question, Ratings] = field(default_factory=dict)
    known: set[Question] = field(default_factory=set)  # those whose answer was in the cache
    meter: Meter = field(default_factory=Meter)
    troubles: list[Finding] = field(default_factory=list)

    @property
    def ratings(self) -> list[Ratings | None]:
        """The ratings of each question in order; None if it has no answer."""
        return [self.found.get(question) for question in self.questions]


class Judge:
    """Rates questions with `rate(questions) -> Round`. It may be async, and it never raises an error for a failure."""

    after_sampling = False  # whether `rate` uses the rollout engine
    time_limit: float  # seconds within which `rate` returns
    rate: Any  # the method of each judge

    def __init__(self, name: str, cache_size: int) -> None:
        """Keep the ratings of the last `cache_size` questions. ValueError for a negative one."""
        require("cache_size", cache_size, at_least(0))
        self.name, self.cache_size = name, cache_size
        self.cache: OrderedDict[str, Ratings] = OrderedDict()
        self.meter = Meter()
        self.complaints = Complaints()

    def begin(self, questions: list[Question]) -> tuple[Round, list[Question]]:
        """Return a round with the known answers, and the distinct questions that must be asked."""
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
        now.found[question] = self.cache[question.key] = ratings
        while len(self.cache) > self.cache_size:
            self.cache.popitem(last=False)

    def end(self, now: Round) -> Round:
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
    """Return a finding: one reason why a question has no answer."""
    return Finding("warning", "", problem, fix, kind)


class Complaints:
    """Warns of a kind of trouble when it first comes, and again after a while with how often it came in between."""

    def __init__(self, quiet_seconds: float = QUIET_SECONDS) -> None:
        self.quiet_seconds = quiet_seconds
        self.said: dict[str, float] = {}  # when, by kind
        self.unsaid: dict[str, int] = {}  # how often since

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
    """Raise TypeError for an option that is unknown, or that is here no longer, with what to do instead."""
    for name in options:
        raise TypeError(f"a judge has no option {name!r}: {GONE.get(name, 'see docs/judge.md for its options')}")


def is_address(url: str) -> bool:
    """Return whether it is the URL of a server: http or https, a host, and a port that there can be."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
