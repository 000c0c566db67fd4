"""What the two judges share: a name, a cache, a meter, and warnings."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowmem_grpo.rewards.judge.cache import Cache
from lowmem_grpo.rewards.judge.meter import Meter, Prices, summary
from lowmem_grpo.rewards.judge.question import Question, Ratings
from lowmem_grpo.rewards.judge.troubles import Complaints, Trouble


@dataclass
class Round:
    """One call of a judge with some questions: what it found, what it took, what went wrong."""

    questions: list[Question]
    found: dict[Question, Ratings] = field(default_factory=dict)
    known: set[Question] = field(default_factory=set)  # of these, whose answer was in the cache
    meter: Meter = field(default_factory=Meter)
    troubles: list[Trouble] = field(default_factory=list)

    @property
    def ratings(self) -> list[Ratings | None]:
        """Of each question in order; None where it has no answer."""
        return [self.found.get(question) for question in self.questions]


class Judge:
    """Rates questions with `rate(questions) -> Round`, which is async in some judges and never raises for a failure."""

    after_sampling = False  # whether `rate` uses the rollout engine
    time_limit: float  # seconds within which `rate` returns
    rate: Any  # the method of each judge

    def __init__(self, name: str, cache_size: int, cache_file: str | Path | None, prices: Prices) -> None:
        self.name, self.prices = name, prices
        self.identity = name  # what else than the question decides what is said: the cache's keys hold it
        self.cache = Cache(cache_size, cache_file)
        self.meter = Meter()
        self.complaints = Complaints()

    def begin(self, questions: list[Question]) -> tuple[Round, list[Question]]:
        """A round, with what is known filled in, and the distinct questions that remain to be asked."""
        now = Round(questions)
        waiting: list[Question] = []
        for question in dict.fromkeys(questions):
            ratings = self.cache.get(question.key(self.identity), len(question.answers))
            if ratings is None:
                waiting.append(question)
            else:
                now.found[question] = ratings
        now.known = set(now.found)
        now.meter.cached, now.meter.calls = len(now.found), len(waiting)
        return now, waiting

    def learn(self, now: Round, question: Question, ratings: Ratings) -> None:
        """Keep an answer."""
        now.found[question] = ratings
        self.cache.put(question.key(self.identity), ratings)

    def end(self, now: Round) -> Round:
        """Count the round, and warn of what went wrong in it."""
        now.meter.failed = sum(question not in now.found for question in dict.fromkeys(now.questions))
        self.meter.add(now.meter)
        for trouble in {trouble.kind: trouble for trouble in now.troubles}.values():
            self.complaints.say(self.name, trouble)
        return now

    @property
    def cost(self) -> float | None:
        """Of everything so far; None where no prices were given."""
        return self.prices.cost(self.meter)

    def summary(self) -> str:
        """What judging took so far, in one line."""
        return summary(self.name, self.meter, self.cost)


def check_settings(rules: dict[str, tuple[object, bool, str]]) -> None:
    """Raises ValueError for the first of {name: (value, whether it is allowed, what is)} that is not allowed."""
    for name, (value, allowed, rule) in rules.items():
        if not allowed:
            raise ValueError(f"{name} is {value!r}; it must be {rule}")


def is_seconds(value: object) -> bool:
    """Whether it is a finite time above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def is_count(value: object, least: int) -> bool:
    """Whether it is a whole number, True and False aside, of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
