"""The base class of judges, with a cache, a meter and rate-limited warnings; and the rewards from a judge's scores. If
the judge fails, the group is left out of the step, and the run continues."""

import inspect
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import urlsplit

from lowmem_grpo.rewards.judge.forms import GroupForm, JudgeForm, JudgeRequest, SingleForm
from lowmem_grpo.rewards.judge.question import GROUP_RUBRIC, SINGLE_RUBRIC, Question, Ratings
from lowmem_grpo.rewards.reward import Reward
from lowmem_grpo.runs.findings import Finding
from lowmem_grpo.utils import TEXT, at_least, require

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


class UnansweredError(Exception):
    """There is no reply with scores, for the reason in `trouble`. `fault` is what the judge is told if it is asked
    again; None if that would not help."""

    def __init__(self, trouble: Finding, fault: str | None = None) -> None:
        super().__init__(trouble.problem)
        self.trouble, self.fault = trouble, fault


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


class JudgeReward(Reward):
    """A reward by a judge whose `rate` is a plain function; `AsyncJudgeReward` is for an async one. Each call logs
    judge/NAME/failed and /cached (shares of the completions), /retries and /tokens (per completion), and /seconds (of
    the call) if the judge was asked. The judge's reasons are logged in the extra column NAME_reason."""

    required = True

    def __init__(self, name: str, judge: Judge, form: JudgeForm) -> None:
        super().__init__(name, form.columns)
        self.judge, self.form = judge, form
        self.after_sampling, self.time_limit = judge.after_sampling, judge.time_limit
        self.trouble: Finding | None = None  # the last reason for a None, shown by `rewards.check`

    @property
    def meter(self) -> Any:
        return self.judge.meter

    def read(self, completions: list[Any]) -> list[Any]:
        return [self.form.read(completion) for completion in completions]

    def pay(self, texts: list[Any], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        requests, began = self.ask(texts, columns, call), time.monotonic()
        now: Any = self.judge.rate(questions_of(requests))
        return self.settle(requests, now, time.monotonic() - began, call)

    def ask(self, texts: list[Any], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[JudgeRequest]:
        """Return the requests about N completions; TypeError if the call has no prompts."""
        if (prompts := call.get("prompts")) is None:
            raise TypeError(f"{self.__name__} shows the judge each prompt and got no prompts; a trainer passes them")
        seeds = call.get("seed") if "environments" in call else None  # equal prompts may be different tasks
        return self.form.questions(texts, columns, prompts, seeds)

    def settle(
        self, requests: list[JudgeRequest], now: Round, seconds: float, call: dict[str, Any]
    ) -> list[float | None]:
        """Return the rewards for a round's scores, None without a score, and log the round."""
        size = sum(len(places) for request in requests for places in request.places)
        rewards: list[float | None] = [None] * size
        reasons = ["not judged"] * size
        for request in requests:
            alone = [(None, "nothing to compare")] * len(request.places)
            ratings = now.found.get(request.question) if request.question else alone
            for places, (score, reason) in zip(request.places, ratings or [], strict=False):
                for place in places:
                    rewards[place] = request.equal if score is None else self.form.worth(score)
                    reasons[place] = reason
        if now.troubles:
            self.trouble = now.troubles[-1]
        self.log(requests, now, seconds, reasons, call)
        return rewards

    def log(
        self, requests: list[JudgeRequest], now: Round, seconds: float, reasons: list[str], call: dict[str, Any]
    ) -> None:
        if callable(log := call.get("log_extra")):
            log(f"{self.__name__}_reason", reasons)
        if not callable(log := call.get("log_metric")) or not reasons:
            return
        meter = now.meter
        totals = {
            "failed": completions_of(requests, lambda question: question not in now.found),
            "cached": completions_of(requests, lambda question: question in now.known), "retries": meter.retried,
            "tokens": meter.prompt_tokens + meter.completion_tokens,
        }
        means = {name: total / len(reasons) for name, total in totals.items()}
        for name, value in (means | ({"seconds": seconds} if meter.calls else {})).items():
            log(f"judge/{self.__name__}/{name}", value)


class AsyncJudgeReward(JudgeReward):
    """A reward by a judge whose `rate` is async, so that other functions run while it waits for a server."""

    async def __call__(self, *, completions: list[Any], **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        return await super().__call__(completions=completions, **kwargs)  # type: ignore[misc]

    async def pay(  # type: ignore[override]
        self, texts: list[Any], columns: dict[str, list[Any]], call: dict[str, Any]
    ) -> list[float | None]:
        requests, began = self.ask(texts, columns, call), time.monotonic()
        now = await self.judge.rate(questions_of(requests))
        return self.settle(requests, now, time.monotonic() - began, call)


def questions_of(requests: list[JudgeRequest]) -> list[Any]:
    return [request.question for request in requests if request.question is not None]


def completions_of(requests: list[JudgeRequest], holds: Callable[[Question], bool]) -> int:
    """Return the number of completions in the requests whose question satisfies `holds`."""
    return sum(len(places) for request in requests if request.question and holds(request.question)
               for places in request.places)


def judged(judge: Judge, rubric: str = SINGLE_RUBRIC, *, score_range: tuple[float, float] = (0.0, 10.0),
           reference: str | None = None, rubric_column: str | None = None, name: str = "judged") -> JudgeReward:
    """Return a reward that scores each completion alone: the judge's score within `score_range`, mapped to 0 to 1.

    `reference` names a dataset column with a good answer, which the judge sees. `rubric_column` names a column with a
    row's own rubric. A row with None there has no reference, or uses `rubric`. The reward is None if the judge failed,
    and then no step is made on that group. TypeError if `judge` is not a judge, ValueError for an empty rubric or an
    invalid score_range.
    """
    low, high = (float(bound) for bound in score_range)
    if not (math.isfinite(high - low) and low < high):
        raise ValueError(f"score_range is {score_range}; it must be (worst, best), with worst below best")
    return reward(name, judge, SingleForm(rubric, rubric_column, reference, low, high))


def ruler(judge: Judge, rubric: str = GROUP_RUBRIC, *, reference: str | None = None, rubric_column: str | None = None,
          name: str = "ruler") -> JudgeReward:
    """Return a reward from 0 to 1, relative within a group: the judge sees the prompt and all completions side by side.

    Multi-turn episodes are compared as a whole, with the results of their tools; the messages with which all of them
    begin are shown once. Identical completions are shown once and get the same score. If all completions of a group are
    identical, the judge is not asked: all get 0.5, or 0 if the text is empty. A group is consecutive completions with
    the same prompt, and for episodes the same seed. `reference` and `rubric_column` work as in `judged`. The reward is
    None if the judge failed. After RULER (ART).
    """
    return reward(name, judge, GroupForm(rubric, rubric_column, reference))


def reward(name: str, judge: Judge, form: JudgeForm) -> JudgeReward:
    """Return an AsyncJudgeReward if `judge.rate` is async, else a JudgeReward. Raises as `judged` does."""
    require("rubric", form.rubric, TEXT)
    if not isinstance(judge, Judge):
        raise TypeError(f"{name} needs a judge, and got a {type(judge).__name__}: give rewards.UrlJudge(base_url, "
                        "model) or rewards.SelfJudge(model)")
    waits = inspect.iscoroutinefunction(judge.rate)
    return (AsyncJudgeReward if waits else JudgeReward)(name, judge, form)
