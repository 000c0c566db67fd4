"""A judge's scores as a reward function. Where it gives none, the group is left out of the step and the run goes on."""

import inspect
import math
import time
from collections.abc import Callable
from typing import Any

from lowmem_grpo.rewards.judge.forms import Asked, Criteria, Form, GroupForm, SingleForm
from lowmem_grpo.rewards.judge.judge import Judge, Round, check_settings
from lowmem_grpo.rewards.judge.question import GROUP_RUBRIC, SINGLE_RUBRIC, Question
from lowmem_grpo.rewards.reward import Reward
from lowmem_grpo.runs.findings import Finding


class JudgeReward(Reward):
    """By a judge whose `rate` is a plain function; `AsyncJudgeReward` by one that waits for a server.

    Logs for each call, so that means over completions are right: judge/NAME/failed and /cached (shares of the
    completions), /retries, /tokens and where prices are known /cost (of a completion), and where the judge was asked
    /seconds (of the call); reasons as the extra column NAME_reason.
    """

    required = True

    def __init__(self, name: str, judge: Judge, form: Form) -> None:
        super().__init__(name, form.columns)
        self.judge, self.form = judge, form
        self.after_sampling, self.time_limit = judge.after_sampling, judge.time_limit
        self.trouble: Finding | None = None  # the last reason for a None; `rewards.check` shows it

    @property
    def meter(self) -> Any:
        """Calls and tokens of the judge, over all rewards that it serves."""
        return self.judge.meter

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        asked, began = self.ask(texts, columns, call), time.monotonic()
        now: Any = self.judge.rate(questions_of(asked))
        return self.settle(asked, now, time.monotonic() - began, call)

    def ask(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[Asked]:
        """Questions about the completions of a call."""
        if (prompts := call.get("prompts")) is None:
            raise TypeError(f"{self.__name__} shows the judge each prompt and got no prompts; a trainer passes them")
        return self.form.ask(texts, columns, prompts)

    def settle(self, asked: list[Asked], now: Round, seconds: float, call: dict[str, Any]) -> list[float | None]:
        """Rewards of a round's scores, None where there are none; and what is logged."""
        size = sum(len(places) for one in asked for places in one.places)
        rewards: list[float | None] = [None] * size
        reasons = ["not judged"] * size
        for one in asked:
            ratings = now.found.get(one.question) if one.question else [(None, "nothing to compare")] * len(one.places)
            for places, (score, reason) in zip(one.places, ratings or [], strict=False):
                for place in places:
                    rewards[place] = one.equal if score is None else self.form.worth(score)
                    reasons[place] = reason
        if now.troubles:
            self.trouble = now.troubles[-1]
        self.log(asked, now, seconds, reasons, call)
        return rewards

    def log(self, asked: list[Asked], now: Round, seconds: float, reasons: list[str], call: dict[str, Any]) -> None:
        if callable(log := call.get("log_extra")):
            log(f"{self.__name__}_reason", reasons)
        if not callable(log := call.get("log_metric")) or not reasons:
            return
        meter, cost = now.meter, self.judge.prices.cost(now.meter)
        totals = {
            "failed": completions_of(asked, lambda question: question not in now.found),
            "cached": completions_of(asked, lambda question: question in now.known), "retries": meter.retried,
            "tokens": meter.prompt_tokens + meter.completion_tokens, **({} if cost is None else {"cost": cost}),
        }
        found = {name: total / len(reasons) for name, total in totals.items()}
        for name, value in (found | ({"seconds": seconds} if meter.calls else {})).items():
            log(f"judge/{self.__name__}/{name}", value)


class AsyncJudgeReward(JudgeReward):
    """By a judge that waits for a server: others go on meanwhile."""

    async def __call__(self, *, completions: list[Any], **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        return await super().__call__(completions=completions, **kwargs)  # type: ignore[misc]

    async def pay(  # type: ignore[override]
        self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]
    ) -> list[float | None]:
        asked, began = self.ask(texts, columns, call), time.monotonic()
        now = await self.judge.rate(questions_of(asked))
        return self.settle(asked, now, time.monotonic() - began, call)


def questions_of(asked: list[Asked]) -> list[Any]:
    """Those that a judge has to be asked: groups whose completions are all alike have none."""
    return [one.question for one in asked if one.question is not None]


def completions_of(asked: list[Asked], holds: Callable[[Question], bool]) -> int:
    """How many completions are behind the questions for which something holds."""
    return sum(len(places) for one in asked if one.question and holds(one.question) for places in one.places)


# The two rewards that users make


def judged(
    judge: Judge, rubric: str = SINGLE_RUBRIC, *, score_range: tuple[float, float] = (0.0, 10.0),
    reference: str | None = None, rubric_column: str | None = None, name: str = "judged",
) -> JudgeReward:
    """A reward of each completion by itself, from 0 to 1: the judge's score within `score_range`, mapped.

    `reference` names a dataset column with a good answer, which the judge sees; `rubric_column` one with a row's own
    rubric. Where such a column is None, there is no reference, and `rubric` counts. None where the judge failed, and
    then no step is made on that group. Raises TypeError for what is no judge, ValueError for settings that make no
    sense.
    """
    low, high = (float(bound) for bound in score_range)
    allowed = math.isfinite(high - low) and low < high
    check_settings({"score_range": (score_range, allowed, "(worst, best), the worst below the best")})
    return reward(name, judge, SingleForm(criteria(rubric, rubric_column, reference), low, high))


def ruler(
    judge: Judge, rubric: str = GROUP_RUBRIC, *, reference: str | None = None, rubric_column: str | None = None,
    name: str = "ruler",
) -> JudgeReward:
    """A reward from 0 to 1, relative within a group: the judge sees the prompt once and all completions side by side.

    Identical completions are shown once and score alike. A group of one completion, or of one text, is not put to the
    judge: all get 0.5, or 0 where that text is empty. Groups are completions in a row with an equal prompt. `reference`
    and `rubric_column` as in `judged`; a group's are those of its row. None where the judge failed. After RULER (ART).
    """
    return reward(name, judge, GroupForm(criteria(rubric, rubric_column, reference)))


def criteria(rubric: str, rubric_column: str | None, reference: str | None) -> Criteria:
    check_settings({"rubric": (rubric, isinstance(rubric, str) and bool(rubric.strip()), "a text that is not empty")})
    return Criteria(rubric, rubric_column, reference)


def reward(name: str, judge: Judge, form: Form) -> JudgeReward:
    """The kind of reward that suits the judge."""
    if not isinstance(judge, Judge):
        raise TypeError(f"{name} needs a judge, and got a {type(judge).__name__}: give rewards.UrlJudge(base_url, "
                        "model) or rewards.SelfJudge(model)")
    waits = inspect.iscoroutinefunction(judge.rate)
    return (AsyncJudgeReward if waits else JudgeReward)(name, judge, form)
