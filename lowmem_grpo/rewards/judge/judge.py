"""The base class of judges, and the rewards from their scores. If a judge fails, the step leaves out the group."""

import inspect
import logging
import math
import time
from collections import OrderedDict
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any

from lowmem_grpo.rewards.judge.question import GROUP_RUBRIC, SINGLE_RUBRIC, Question, Ratings, compared, transcript_of
from lowmem_grpo.rewards.reward import Reward
from lowmem_grpo.runs.records import prompt_text
from lowmem_grpo.types import Finding
from lowmem_grpo.utils import FINITE, TEXT, Rule, as_python, at_least, require

logger = logging.getLogger(__name__)

GONE = {"cache_file": "ratings are kept as long as the judge object; leave it out"} | dict.fromkeys(
    ("price_prompt", "price_completion"), "multiply the counts of tokens in judge.meter by your prices")
RANGE: Rule = ("(worst, best), with worst below best", lambda pair: isinstance(pair, list | tuple) and len(
    pair) == 2 and FINITE[1](pair) and 0 < pair[1] - pair[0] < math.inf)
EQUAL = 0.5  # the reward of completions that have no other to be compared with

AskedAnswer = tuple[Question, int]  # a completion's question, and its number among the answers


@dataclass
class Meter:
    """The cost of judging, as counts: of all calls since a judge was created, or of a single call."""

    calls: int = 0  # questions that were asked; a retry does not count again
    cached: int = 0  # questions answered from the cache
    retried: int = 0  # further requests for a question, after a reply without scores
    failed: int = 0  # questions without an answer
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, other: "Meter") -> None:
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))


@dataclass
class Round(Meter):
    """One call of a judge with some questions: the ratings, their cost, and the failures."""

    found: dict[Question, Ratings] = field(default_factory=dict)
    known: set[Question] = field(default_factory=set)  # questions answered from the cache
    troubles: list[Finding] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def report(self, kind: str, problem: str, fix: str) -> None:
        """Record the reason why a question has no answer, and the fix."""
        self.troubles.append(Finding("warning", "", problem, fix, kind))


class Judge:
    """The base class of judges. A judge defines `rate(questions) -> Round`, which may be async. Failures raise no
    error: they are recorded in the Round."""

    after_sampling = False  # `rate` uses the rollout engine
    time_limit: float  # seconds within which `rate` returns
    rate: Any  # defined by each judge

    def __init__(self, name: str, cache_size: int, **gone: Any) -> None:
        """`cache_size` is the number of cached questions. TypeError for an unknown or removed option."""
        for option in gone:
            raise TypeError(f"a judge has no option {option!r}: {GONE.get(option, 'see docs/judge.md')}")
        require("cache_size", cache_size, at_least(0))
        self.name, self.cache_size = name, cache_size
        self.cache: OrderedDict[str, Ratings] = OrderedDict()
        self.meter = Meter()
        self.warned = set[str]()  # kinds of trouble

    def begin(self, questions: list[Question]) -> tuple[Round, list[Question]]:
        """Return a `Round` with the cached ratings, and the distinct questions that are not in the cache."""
        now = Round()
        now.found = {question: ratings for question in questions if (ratings := self.cache.get(question.key))}
        now.known = set(now.found)
        waiting = [question for question in dict.fromkeys(questions) if question not in now.known]
        now.calls, now.cached, now.failed = len(waiting), len(now.known), len(waiting)
        return now, waiting

    def learn(self, now: Round, question: Question, ratings: Ratings) -> None:
        """Store a question's ratings in the `Round` and in the cache."""
        now.found[question] = self.cache[question.key] = ratings
        now.failed -= 1
        while len(self.cache) > self.cache_size:
            self.cache.popitem(last=False)

    def end(self, now: Round) -> Round:
        """Add the cost of a `Round` to the meter, and warn once of each kind of failure; return the `Round`."""
        self.meter.add(now)
        for trouble in now.troubles:
            if trouble.kind not in self.warned:
                self.warned.add(trouble.kind)
                logger.warning("judge %s: completions have no reward: %s", self.name, trouble)
        return now

    def summary(self) -> str:
        """Return the cost of judging so far, in one line."""
        meter = self.meter
        return (f"judge {self.name}: {meter.calls:,} calls ({meter.cached:,} more from the cache), {meter.retried:,} "
                f"retried, {meter.failed:,} failed; {meter.prompt_tokens:,} prompt and {meter.completion_tokens:,} "
                f"completion tokens")


class JudgeReward(Reward):
    """A reward by a judge whose `rate` is a plain function; `AsyncJudgeReward` is for an async one. Each call logs the
    metrics judge/NAME/..., and the judge's reasons in the extra column NAME_reason."""

    required = True

    def __init__(self, name: str, judge: Judge, rubric: str, rubric_column: str | None, reference: str | None,
                 score_range: tuple[float, float] | None = None) -> None:
        """With a `score_range`, each completion is judged alone. With None, all of a group are judged together."""
        super().__init__(name, tuple(column for column in (rubric_column, reference) if column is not None))
        self.judge, self.rubric, self.rubric_column, self.reference = judge, rubric, rubric_column, reference
        self.grouped, (self.low, self.high) = score_range is None, score_range or (0.0, 1.0)
        self.after_sampling, self.time_limit = judge.after_sampling, judge.time_limit
        self.trouble: Finding | None = None  # the last reason for a None, shown by `rewards.check`

    def read(self, completions: list[Any]) -> list[Any]:
        """Return what the judge sees of each completion: the text, or the transcript if episodes are compared."""
        if self.grouped and any(isinstance(completion, list) and len(completion) > 1 for completion in completions):
            return list(map(transcript_of, completions))
        return super().read(completions)

    def pay(self, texts: list[Any], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        places = self.ask(texts, columns, call)
        asked = dict.fromkeys(question for question, _ in places if question.is_open)
        return self.settle(places, self.judge.rate([*asked]), call)

    def ask(self, texts: list[Any], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[AskedAnswer]:
        """Return each completion's question, and the completion's index among the question's answers. Equal completions
        of a group are one answer. TypeError without prompts."""
        if (prompts := call.get("prompts")) is None:
            raise TypeError(f"{self.__name__} shows the judge each prompt and got no prompts; a trainer passes them")
        nothing = [None] * len(texts)
        rubrics, references = (columns[name] if name else nothing for name in (self.rubric_column, self.reference))
        seeds = call.get("seed") if "environments" in call else None  # equal prompts may be different tasks
        apart = nothing if self.grouped else range(len(texts))
        tasks = [(prompt_text(prompt), self.rubric if rubric in (None, "") else str(rubric),
                  None if known is None else str(known), *others) for prompt, rubric, known, *others
                 in zip(prompts, rubrics, references, seeds or nothing, apart, strict=True)]
        places: list[AskedAnswer] = []
        for (prompt, rubric, known, *_), group in groupby(zip(tasks, texts, strict=True), lambda item: item[0]):
            each = [text for _, text in group]
            answers = list(dict.fromkeys(each))
            question = compared(prompt, answers, rubric, known) if self.grouped else Question(
                prompt, tuple(answers), rubric, known, low=self.low, high=self.high)
            places += [(question, answers.index(text)) for text in each]
        return places

    def settle(self, places: list[AskedAnswer], now: Round, call: dict[str, Any]) -> list[float | None]:
        """Return the rewards from the scores of a `Round` (None where there is no score), and log its cost."""
        if now.troubles:
            self.trouble = now.troubles[-1]
        ratings = [self.rating_of(*place, now) for place in places]
        self.log(places, now, [reason for _, reason in ratings], call)
        return [reward for reward, _ in ratings]

    def rating_of(self, question: Question, number: int, now: Round) -> tuple[float | None, str]:
        """Return the reward of a completion (None if it was not judged), and the judge's reason."""
        if not question.is_open:
            return EQUAL if question.answers[0].strip() else 0.0, "nothing to compare"
        if question not in now.found:
            return None, "not judged"
        score, reason = now.found[question][number]
        return (score - self.low) / (self.high - self.low), reason

    def log(self, places: list[AskedAnswer], now: Round, reasons: list[str], call: dict[str, Any]) -> None:
        if callable(log := call.get("log_extra")):
            log(f"{self.__name__}_reason", reasons)
        if not callable(log := call.get("log_metric")) or not reasons:
            return
        asked = [question for question, _ in places if question.is_open]
        totals = {"failed": sum(question not in now.found for question in asked),
                  "cached": sum(question in now.known for question in asked),
                  "retries": now.retried, "tokens": now.prompt_tokens + now.completion_tokens}
        means = {name: total / len(reasons) for name, total in totals.items()}
        for name, value in (means | ({"seconds": time.monotonic() - now.began} if now.calls else {})).items():
            log(f"judge/{self.__name__}/{name}", value)


class AsyncJudgeReward(JudgeReward):
    """A reward by a judge whose `rate` is async, so that other functions run while it waits for a server."""

    async def __call__(self, **call: Any) -> list[float | None]:  # type: ignore[override]
        return await super().__call__(**call)  # type: ignore[misc]

    async def settle(self, places: list[AskedAnswer], now: Any, call: dict[str, Any]) -> Any:  # type: ignore[override]
        return super().settle(places, await now, call)


def judged(judge: Judge, rubric: str = SINGLE_RUBRIC, *, score_range: tuple[float, float] = (0.0, 10.0),
           reference: str | None = None, rubric_column: str | None = None, name: str = "judged") -> JudgeReward:
    """Return a reward that scores each completion alone: the judge's score within `score_range`, mapped to 0 to 1.

    `reference` names a dataset column with a good answer, which the judge sees; None means no reference.
    `rubric_column` names a column with each row's own rubric; None means `rubric`. The reward is None if the judge
    failed; the group is then left out of the step. TypeError if `judge` is not a judge, ValueError for an empty rubric
    or an invalid score_range.
    """
    require("score_range", bounds := as_python(score_range), RANGE)
    return reward(name, judge, rubric, rubric_column, reference, tuple(map(float, bounds)))


def ruler(judge: Judge, rubric: str = GROUP_RUBRIC, *, reference: str | None = None, rubric_column: str | None = None,
          name: str = "ruler") -> JudgeReward:
    """Return a reward from 0 to 1, relative within a group: the judge sees the prompt and all completions side by side.

    Multi-turn episodes are compared as a whole, with the results of their tools. Identical completions are shown once
    and get the same score. If all completions of a group are identical, the judge is not asked: each gets 0.5, or 0 if
    it is empty. A group is consecutive completions with the same prompt, and for episodes the same seed. `reference`
    and `rubric_column` work as in `judged`. The reward is None if the judge failed. After RULER (ART)."""
    return reward(name, judge, rubric, rubric_column, reference)


def reward(name: str, judge: Judge, rubric: str, *columns_and_range: Any) -> JudgeReward:
    """Return an AsyncJudgeReward if `judge.rate` is async, else a JudgeReward. Raises as `judged` does."""
    require("rubric", rubric, TEXT)
    if not isinstance(judge, Judge):
        raise TypeError(f"{name} needs a judge, and got a {type(judge).__name__}: give rewards.UrlJudge(base_url, "
                        "model) or rewards.SelfJudge(model)")
    waits = inspect.iscoroutinefunction(judge.rate)
    return (AsyncJudgeReward if waits else JudgeReward)(name, judge, rubric, *columns_and_range)
