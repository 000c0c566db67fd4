"""RULER: a judge sees the trajectories of a group side by side and scores them relative to each other.

After ART's function of this name, on the judges of this package. See docs/judge.md.
"""

import inspect
import logging
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from lowmem_grpo.agents.judges import judge_of
from lowmem_grpo.agents.trajectories import History, Trajectory, TrajectoryGroup, message_of
from lowmem_grpo.rewards.judge.forms import EQUAL
from lowmem_grpo.rewards.judge.judge import Judge, Round
from lowmem_grpo.rewards.judge.question import GROUP_RUBRIC, Ratings
from lowmem_grpo.rewards.judge.transcript import Transcript, as_line, compared, transcript_of

logger = logging.getLogger(__name__)

DEFAULT_JUDGE = "openai/o3"  # ART's
DEFAULT_RUBRIC = GROUP_RUBRIC
TOOLS = "Tools that the agent may call:"
ALONE = "There is nothing to compare it with, so the judge was not asked."


class JudgeError(RuntimeError):
    """The judge gave no score. The message says why, and what to do."""


class TrajectoryScore(BaseModel):
    """What the judge says of one trajectory."""

    trajectory_id: str  # its number, from 1
    explanation: str
    score: float  # from 0 to 1


async def ruler(
    message_lists: Sequence[Sequence[Any]], judge_model: str | Judge = DEFAULT_JUDGE,
    extra_litellm_params: dict[str, Any] | None = None, rubric: str = DEFAULT_RUBRIC,
    tools: list[dict[str, Any]] | None = None, *, debug: bool = False,
) -> list[TrajectoryScore]:
    """Scores of trajectories, each given as its messages, from 0 to 1 and relative to each other.

    judge_model: "openai/NAME" (the key is OPENAI_API_KEY, as openai's client reads it), an address that begins with
    http, or a judge (`rewards.UrlJudge(...)`, `model.judge()`). extra_litellm_params: base_url, api_key, timeout,
    num_retries, and what goes into each request (temperature, max_tokens, ...). debug: log what the judge says.

    What all began with is shown once, and trajectories that are alike are shown once. If there is nothing to compare,
    all get 0.5 and the judge is not asked. Raises JudgeError if it gives no scores, ValueError and TypeError for what
    makes no sense.
    """
    judge = judge_of(judge_model, extra_litellm_params)
    histories = [[History(messages_and_choices=list(map(message_of, messages)))] for messages in message_lists]
    return await scored(histories, judge, rubric, told(tools), debug)


async def ruler_score_group(
    group: TrajectoryGroup, judge_model: str | Judge = DEFAULT_JUDGE,
    extra_litellm_params: dict[str, Any] | None = None, rubric: str = DEFAULT_RUBRIC, *,
    swallow_exceptions: bool = False, debug: bool = False,
) -> TrajectoryGroup | None:
    """The group with the judge's scores as rewards; see `ruler` for the arguments.

    The group itself stays as it is. In the new one `metrics["ruler_score"]` holds the score too,
    `metrics["independent_reward"]` the former reward, and `logs` the judge's reason. All conversations of a trajectory
    are judged. With `swallow_exceptions`, a judge that fails is logged and gives None: return it from `after_each`, and
    the group is left out.
    """
    if not isinstance(group, TrajectoryGroup):
        raise TypeError(f"ruler_score_group takes one TrajectoryGroup, and got a {type(group).__name__}; it fits "
                        "gather_trajectory_groups(..., after_each=lambda group: ruler_score_group(group, ...))")
    judge = judge_of(judge_model, extra_litellm_params)
    common = tools_of(group.trajectories)
    try:
        scores = await scored([one.histories for one in group.trajectories], judge, rubric, common, debug)
    except JudgeError as error:
        if not swallow_exceptions:
            raise
        logger.warning("a group of %d trajectories is left out: %s", len(group), error)
        return None
    pairs = zip(group.trajectories, scores, strict=True)
    return group.model_copy(update={"trajectories": [rewarded(one, score) for one, score in pairs]})


def rewarded(trajectory: Trajectory, score: TrajectoryScore) -> Trajectory:
    """A copy with the judge's score as its reward; the former one is kept in `metrics`."""
    metrics = {**trajectory.metrics, "independent_reward": trajectory.reward, "ruler_score": score.score}
    logs = [*trajectory.logs, f"RULER: {score.explanation}"]
    return trajectory.model_copy(update={"reward": score.score, "metrics": metrics, "logs": logs})


async def scored(
    trajectories: Sequence[Sequence[History]], judge: Judge, rubric: str, tools: str, debug: bool
) -> list[TrajectoryScore]:
    """The scores of trajectories, each given as its conversations."""
    if not (isinstance(rubric, str) and rubric.strip()):
        raise ValueError(f"rubric is {rubric!r}; it must be a text that is not empty")
    seen = [lines_of(histories, tools) for histories in trajectories]
    different = list(dict.fromkeys(seen))
    if len(different) < 2:
        ratings: Ratings = [(EQUAL, ALONE)] * len(different)
    else:
        ratings = await asked(judge, compared(tools, different, rubric))
    known = dict(zip(different, ratings, strict=True))
    found = [TrajectoryScore(trajectory_id=str(number), score=known[one][0], explanation=known[one][1])
             for number, one in enumerate(seen, start=1)]
    if debug:
        for score in found:
            logger.warning("RULER: trajectory %s gets %g: %s", score.trajectory_id, score.score, score.explanation)
    return found


async def asked(judge: Judge, question: Any) -> Ratings:
    """The judge's ratings. JudgeError without them."""
    now: Any = judge.rate([question])
    if inspect.isawaitable(now):
        now = await now
    found: Ratings | None = now.found.get(question) if isinstance(now, Round) else None
    if found is None:
        why = f"{now.troubles[-1].problem}; {now.troubles[-1].fix}" if now.troubles else "it did not say why"
        raise JudgeError(f"the judge {judge.name} gave no scores: {why}")
    return found


def lines_of(histories: Sequence[History], tools: str) -> Transcript:
    """All conversations of a trajectory, the second and further ones below a line of their own. Tools are shown where
    they are not those that stand above all trajectories."""
    lines: list[str] = []
    for number, history in enumerate(histories, start=1):
        if number > 1:
            lines.append(as_line({"conversation": number}))
        if history.tools and told(history.tools) != tools:
            lines.append(told(history.tools))
        lines += transcript_of(history.messages())
    return tuple(lines)


def tools_of(trajectories: Sequence[Trajectory]) -> str:
    """The tools that all trajectories have, told once."""
    each = {told(one.tools) for one in trajectories}
    return each.pop() if len(each) == 1 else ""


def told(tools: list[dict[str, Any]] | None) -> str:
    """The tools as the judge reads them; empty where there are none."""
    return "\n".join([TOOLS, *map(as_line, tools)]) if tools else ""
