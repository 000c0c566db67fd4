"""The base class of judges, with a cache, a meter and rate-limited warnings; and the rewards from a judge's scores. If
the judge fails, the group is left out of the step, and the run continues."""

import inspect
import logging
import math
import time
from collections import OrderedDict
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any

from lowmem_grpo.rewards.judge.question import (
    GROUP_RUBRIC,
    SINGLE_RUBRIC,
    Question,
    Transcript,
    compared,
    transcript_of,
)
from lowmem_grpo.rewards.judge.reply import Ratings
from lowmem_grpo.rewards.reward import Reward
from lowmem_grpo.rewards.texts import completion_text
from lowmem_grpo.runs.findings import Finding
from lowmem_grpo.runs.records import prompt_text
from lowmem_grpo.utils import TEXT, at_least, require

logger = logging.getLogger(__name__)

GONE = {"cache_file": "what was judged is kept as long as the judge; leave it out"} | dict.fromkeys(
    ("price_prompt", "price_completion"), "multiply the counts of tokens in judge.meter by your prices")
EQUAL = 0.5  # the reward of completions that have no other to be compared with
QUIET_SECONDS = 300.0  # between two warnings of the same kind

Place = tuple[Question, int] | float  # a completion's question and its number among the answers; else its reward


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
    began: float = field(default_factory=time.monotonic)

    def report(self, kind: str, problem: str, fix: str) -> None:
        """Note that a question has no answer for this reason."""
        self.troubles.append(Finding("warning", "", problem, fix, kind))


class Judge:
    """The base of judges, whose method `rate(questions) -> Round` may be async and raises no error for a failure."""

    after_sampling = False  # `rate` uses the rollout engine
    time_limit: float  # seconds within which `rate` returns
    rate: Any  # defined by each judge

    def __init__(self, name: str, cache_size: int, **gone: Any) -> None:
        """`cache_size` is the number of questions whose ratings are kept. ValueError if it is negative, TypeError, with
        what to do instead, for an option in `gone`, which is unknown or was removed."""
        for option in gone:
            advice = GONE.get(option, "see docs/judge.md for its options")
            raise TypeError(f"a judge has no option {option!r}: {advice}")
        require("cache_size", cache_size, at_least(0))
        self.name, self.cache_size = name, cache_size
        self.cache: OrderedDict[str, Ratings] = OrderedDict()
        self.meter = Meter()
        self.warned: dict[str, float] = {}  # time of the last warning, by kind

    def begin(self, questions: list[Question]) -> tuple[Round, list[Question]]:
        """Return a round with the ratings found in the cache, and the distinct questions that must be asked."""
        now, distinct = Round(questions), dict.fromkeys(questions)
        now.found = {question: ratings for question in distinct if (ratings := self.cache.get(question.key))}
        now.known = set(now.found)
        waiting = [question for question in distinct if question not in now.known]
        now.meter.cached, now.meter.calls = len(now.known), len(waiting)
        return now, waiting

    def learn(self, now: Round, question: Question, ratings: Ratings) -> None:
        """Store a question's ratings in the round and in the cache."""
        now.found[question] = self.cache[question.key] = ratings
        while len(self.cache) > self.cache_size:
            self.cache.popitem(last=False)

    def end(self, now: Round) -> Round:
        """Count the failed questions, add the round to the meter, and return it. Warn of each kind of its troubles at
        most once per QUIET_SECONDS."""
        now.meter.failed = len(set(now.questions) - now.found.keys())
        self.meter.add(now.meter)
        for trouble in now.troubles:
            if (moment := time.monotonic()) - self.warned.get(trouble.kind, -math.inf) >= QUIET_SECONDS:
                self.warned[trouble.kind] = moment
                problem = f"{trouble.problem}; those completions have no reward"
                logger.warning("%s", replace(trouble, about=f"judge {self.name}", problem=problem))
        return now

    def summary(self) -> str:
        """Return the cost of judging so far, in one line."""
        meter = self.meter
        return (f"judge {self.name}: {meter.calls:,} calls ({meter.cached:,} more from the cache), {meter.retried:,} "
                f"retried, {meter.failed:,} failed; {meter.prompt_tokens:,} prompt and {meter.completion_tokens:,} "
                f"completion tokens")

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"warned": {}}


class JudgeReward(Reward):
    """A reward by a judge whose `rate` is a plain function; `AsyncJudgeReward` is for an async one. Each call logs
    judge/NAME/failed and /cached (shares of the completions), /retries and /tokens (per completion), and /seconds (of
    the call) if the judge was asked. The judge's reasons are logged in the extra column NAME_reason."""

    required = True

    def __init__(self, name: str, judge: Judge, rubric: str, rubric_column: str | None, reference: str | None,
                 score_range: tuple[float, float] | None = None) -> None:
        """Each completion is judged alone in `score_range`; if that is None, side by side with others of its group."""
        super().__init__(name, tuple(dict.fromkeys(column for column in (rubric_column, reference) if column)))
        self.judge, self.rubric, self.rubric_column, self.reference = judge, rubric, rubric_column, reference
        self.grouped, (self.low, self.high) = score_range is None, score_range or (0.0, 1.0)
        self.after_sampling, self.time_limit = judge.after_sampling, judge.time_limit
        self.trouble: Finding | None = None  # the last reason for a None, shown by `rewards.check`

    @property
    def meter(self) -> Meter:
        return self.judge.meter

    def read(self, completions: list[Any]) -> list[Any]:
        """Return what the judge sees of each completion: its text; in a group, an episode's transcript."""
        return [transcript_of(completion) if self.grouped and isinstance(completion, list) and len(completion) > 1
                else completion_text(completion) for completion in completions]

    def pay(self, texts: list[Any], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        places = self.ask(texts, columns, call)
        return self.settle(places, self.judge.rate(questions_of(places)), call)

    def ask(self, texts: list[Any], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[Place]:
        """Return the places of N completions. A group is consecutive completions with the same prompt, and for episodes
        the same seed. TypeError without prompts."""
        if (prompts := call.get("prompts")) is None:
            raise TypeError(f"{self.__name__} shows the judge each prompt and got no prompts; a trainer passes them")
        nothing = [None] * len(texts)
        rubrics, references = (columns[name] if name else nothing for name in (self.rubric_column, self.reference))
        seeds = call.get("seed") if "environments" in call else None  # equal prompts may be different tasks
        tasks = [(prompt_text(prompt), self.rubric if rubric in (None, "") else str(rubric),
                  None if known is None else str(known), seed)
                 for prompt, rubric, known, seed in zip(prompts, rubrics, references, seeds or nothing, strict=True)]
        if not self.grouped:
            return [(Question(prompt, (text,), rubric, reference, False, self.low, self.high), 0)
                    for text, (prompt, rubric, reference, _) in zip(texts, tasks, strict=True)]
        groups = groupby(zip(tasks, texts, strict=True), lambda item: item[0])
        return [place for task, group in groups for place in places_of([text for _, text in group], *task[:3])]

    def settle(self, places: list[Place], now: Round, call: dict[str, Any]) -> list[float | None]:
        """Return the rewards for a round's scores, None without a score, and log the round."""
        if now.troubles:
            self.trouble = now.troubles[-1]
        ratings = [self.rating_of(place, now) for place in places]
        self.log(places, now, [reason for _, reason in ratings], call)
        return [reward for reward, _ in ratings]

    def rating_of(self, place: Place, now: Round) -> tuple[float | None, str]:
        """Return the reward of a completion, and the judge's reason."""
        if isinstance(place, float):
            return place, "nothing to compare"
        question, number = place
        if question not in now.found:
            return None, "not judged"
        score, reason = now.found[question][number]
        return (score - self.low) / (self.high - self.low), reason

    def log(self, places: list[Place], now: Round, reasons: list[str], call: dict[str, Any]) -> None:
        if callable(log := call.get("log_extra")):
            log(f"{self.__name__}_reason", reasons)
        if not callable(log := call.get("log_metric")) or not reasons:
            return
        asked = [place[0] for place in places if not isinstance(place, float)]
        totals = {"failed": sum(question not in now.found for question in asked),
                  "cached": sum(question in now.known for question in asked),
                  "retries": now.meter.retried, "tokens": now.meter.prompt_tokens + now.meter.completion_tokens}
        means = {name: total / len(reasons) for name, total in totals.items()}
        if now.meter.calls:
            means["seconds"] = time.monotonic() - now.began
        for name, value in means.items():
            log(f"judge/{self.__name__}/{name}", value)


class AsyncJudgeReward(JudgeReward):
    """A reward by a judge whose `rate` is async, so that other functions run while it waits for a server."""

    async def __call__(self, *, completions: list[Any], **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        return await super().__call__(completions=completions, **kwargs)  # type: ignore[misc]

    async def pay(  # type: ignore[override]
        self, texts: list[Any], columns: dict[str, list[Any]], call: dict[str, Any]
    ) -> list[float | None]:
        places = self.ask(texts, columns, call)
        return self.settle(places, await self.judge.rate(questions_of(places)), call)


def questions_of(places: list[Place]) -> list[Question]:
    return list(dict.fromkeys(place[0] for place in places if not isinstance(place, float)))


def places_of(texts: list[str | Transcript], prompt: str, rubric: str, reference: str | None) -> list[Place]:
    """Return the places of a group's completions, with identical ones shown once. If all are identical, nothing is
    asked: all get EQUAL, or 0 if the text is empty."""
    answers = list(dict.fromkeys(texts))
    if len(answers) == 1:
        is_empty = isinstance(answers[0], str) and not answers[0].strip()
        return [0.0 if is_empty else EQUAL] * len(texts)
    question = compared(prompt, answers, rubric, reference)
    return [(question, answers.index(text)) for text in texts]


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
    return reward(name, judge, rubric, rubric_column, reference, (low, high))


def ruler(judge: Judge, rubric: str = GROUP_RUBRIC, *, reference: str | None = None, rubric_column: str | None = None,
          name: str = "ruler") -> JudgeReward:
    """Return a reward from 0 to 1, relative within a group: the judge sees the prompt and all completions side by side.

    Multi-turn episodes are compared as a whole, with the results of their tools; the messages with which all of them
    begin are shown once. Identical completions are shown once and get the same score. If all completions of a group are
    identical, the judge is not asked: all get 0.5, or 0 if the text is empty. A group is consecutive completions with
    the same prompt, and for episodes the same seed. `reference` and `rubric_column` work as in `judged`. The reward is
    None if the judge failed. After RULER (ART).
    """
    return reward(name, judge, rubric, rubric_column, reference)


def reward(name: str, judge: Judge, rubric: str, *columns_and_range: Any) -> JudgeReward:
    """Return an AsyncJudgeReward if `judge.rate` is async, else a JudgeReward. Raises as `judged` does."""
    require("rubric", rubric, TEXT)
    if not isinstance(judge, Judge):
        raise TypeError(f"{name} needs a judge, and got a {type(judge).__name__}: give rewards.UrlJudge(base_url, "
                        "model) or rewards.SelfJudge(model)")
    waits = inspect.iscoroutinefunction(judge.rate)
    return (AsyncJudgeReward if waits else JudgeReward)(name, judge, rubric, *columns_and_range)
