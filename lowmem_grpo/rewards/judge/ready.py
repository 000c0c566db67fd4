"""The two rewards by a judge: `judged`, of each completion by itself, and `ruler`, of a group side by side."""

import inspect
import math

from lowmem_grpo.rewards.judge.forms import Criteria, Form, GroupForm, SingleForm
from lowmem_grpo.rewards.judge.judge import Judge, check_settings
from lowmem_grpo.rewards.judge.judge_reward import AsyncJudgeReward, JudgeReward
from lowmem_grpo.rewards.judge.rubrics import GROUP_RUBRIC, SINGLE_RUBRIC


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
