"""RULER, ART's reward: a judge scores the trajectories of a group relative to each other. See docs/judge.md."""

import asyncio
import copy
import inspect
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel

from lowmem_grpo.agents.progress import described
from lowmem_grpo.agents.trajectories import History, Trajectory, TrajectoryGroup, message_of
from lowmem_grpo.rewards.judge.judge import EQUAL, Judge, Round
from lowmem_grpo.rewards.judge.question import (
    GROUP_RUBRIC,
    Question,
    Ratings,
    Transcript,
    as_line,
    compared,
    transcript_of,
)
from lowmem_grpo.rewards.judge.self_judge import SelfJudge
from lowmem_grpo.rewards.judge.url_judge import UrlJudge, is_address
from lowmem_grpo.server.openai.request_queue import EngineCall
from lowmem_grpo.utils import TEXT, require

logger = logging.getLogger(__name__)

DEFAULT_JUDGE = "openai/o3"  # ART's
DEFAULT_RUBRIC = GROUP_RUBRIC
TOOLS = "Tools that the agent may call:"
ALONE = "There is nothing to compare it with, so the judge was not asked."
SELF = "self"
OPENAI = "openai"
AT_AN_ADDRESS = ("hosted_vllm", "openrouter", "anthropic", "gemini", "groq", "together_ai", "mistral", "deepseek",
                 "xai")  # LiteLLM's provider prefixes of model names
ADDRESSES = ("base_url", "api_base")  # two names of the same argument
OF_THE_JUDGE = {"num_retries": "retries", "max_retries": "retries", "timeout": "timeout"}
KEPT = 32  # the most judges that `made` holds, each with its cached ratings

made: OrderedDict[str, Judge] = OrderedDict()
OPEN: list[Any] = []  # the open runs: each has a `name` and a `judge()`


class JudgeError(RuntimeError):
    """The judge gave no scores; the message says why, and what to do."""


class TrajectoryScore(BaseModel):
    """The judge's verdict on one trajectory."""

    trajectory_id: str  # its number, from 1
    explanation: str
    score: float  # from 0 to 1


async def ruler(
    message_lists: Sequence[Sequence[Any]], judge_model: str | Judge = DEFAULT_JUDGE,
    extra_litellm_params: dict[str, Any] | None = None, rubric: str = DEFAULT_RUBRIC,
    tools: list[dict[str, Any]] | None = None, *, debug: bool = False,
) -> list[TrajectoryScore]:
    """Return a judge's scores of trajectories (lists of messages), from 0 to 1 and relative to each other.

    judge_model: "openai/NAME" (the key is OPENAI_API_KEY, as openai's client reads it), an address that begins with
    http, or a judge (`rewards.UrlJudge(...)`, `model.judge()`). extra_litellm_params: base_url, api_key, timeout,
    num_retries, and fields of each request (temperature, max_tokens, ...). debug: log what the judge says.

    The judge sees a common beginning once, and identical trajectories once. If there is nothing to compare, all get 0.5
    and the judge is not asked. Raises JudgeError if the judge gives no scores, ValueError and TypeError for wrong
    arguments."""
    judge = judge_of(judge_model, extra_litellm_params)
    histories = [[History(messages_and_choices=list(map(message_of, messages)))] for messages in message_lists]
    return await scored(histories, judge, rubric, tools_text(tools), debug)


async def ruler_score_group(
    group: TrajectoryGroup, judge_model: str | Judge = DEFAULT_JUDGE,
    extra_litellm_params: dict[str, Any] | None = None, rubric: str = DEFAULT_RUBRIC, *,
    swallow_exceptions: bool = False, debug: bool = False,
) -> TrajectoryGroup | None:
    """Return a copy of the group with the judge's scores as rewards; see `ruler` for the arguments.

    In the copy `metrics["ruler_score"]` holds the score too, `metrics["independent_reward"]` the former reward, and
    `logs` the judge's reason. All conversations of a trajectory are judged. With `swallow_exceptions`, a failure of the
    judge is logged and the result is None: return that from `after_each` to drop the group."""
    if not isinstance(group, TrajectoryGroup):
        raise TypeError(f"ruler_score_group takes one TrajectoryGroup, and got a {type(group).__name__}; it fits "
                        "gather_trajectory_groups(..., after_each=lambda group: ruler_score_group(group, ...))")
    judge = judge_of(judge_model, extra_litellm_params)
    each = {tools_text(trajectory.tools) for trajectory in group.trajectories}
    common = each.pop() if len(each) == 1 else ""
    try:
        scores = await scored([trajectory.histories for trajectory in group.trajectories], judge, rubric, common, debug)
    except JudgeError as error:
        if not swallow_exceptions:
            raise
        logger.warning("a group of %d trajectories is left out: %s", len(group), error)
        return None
    pairs = zip(group.trajectories, scores, strict=True)
    return group.model_copy(update={"trajectories": [rewarded(trajectory, score) for trajectory, score in pairs]})


def rewarded(trajectory: Trajectory, score: TrajectoryScore) -> Trajectory:
    metrics = {**trajectory.metrics, "independent_reward": trajectory.reward, "ruler_score": score.score}
    logs = [*trajectory.logs, f"RULER: {score.explanation}"]
    return trajectory.model_copy(update={"reward": score.score, "metrics": metrics, "logs": logs})


async def scored(
    trajectories: Sequence[Sequence[History]], judge: Judge, rubric: str, tools: str, debug: bool
) -> list[TrajectoryScore]:
    require("rubric", rubric, TEXT)
    seen = [lines_of(histories, tools) for histories in trajectories]
    different = list(dict.fromkeys(seen))
    if len(different) < 2:
        ratings: Ratings = [(EQUAL, ALONE)] * len(different)
    else:
        ratings = await asked(judge, compared(tools, different, rubric))
    known = dict(zip(different, ratings, strict=True))
    scores = [TrajectoryScore(trajectory_id=str(number), score=known[transcript][0], explanation=known[transcript][1])
             for number, transcript in enumerate(seen, start=1)]
    if debug:
        for score in scores:
            logger.warning("RULER: trajectory %s gets %g: %s", score.trajectory_id, score.score, score.explanation)
    return scores


async def asked(judge: Judge, question: Any) -> Ratings:
    """Return the judge's ratings. JudgeError if it gives none."""
    now: Any = judge.rate([question])
    if inspect.isawaitable(now):
        now = await now
    ratings: Ratings | None = now.found.get(question) if isinstance(now, Round) else None
    if ratings is None:
        why = f"{now.troubles[-1].problem}; {now.troubles[-1].fix}" if now.troubles else "it did not say why"
        raise JudgeError(f"the judge {judge.name} gave no scores: {why}")
    return ratings


def lines_of(histories: Sequence[History], tools: str) -> Transcript:
    """Return all conversations of a trajectory as lines, with a heading for the second and further ones. Tools are
    shown only if they differ from `tools`, which are shown once above all trajectories."""
    lines: list[str] = []
    for number, history in enumerate(histories, start=1):
        if number > 1:
            lines.append(as_line({"conversation": number}))
        if history.tools and tools_text(history.tools) != tools:
            lines.append(tools_text(history.tools))
        lines += transcript_of(history.messages())
    return tuple(lines)


def tools_text(tools: list[dict[str, Any]] | None) -> str:
    return "\n".join([TOOLS, *map(as_line, tools)]) if tools else ""


def judge_of(named: Any, params: Mapping[str, Any] | None) -> Judge:
    """Return the judge that a name and parameters describe; equal arguments give the same judge. ValueError or
    TypeError if they describe no judge."""
    options = dict(params or {})
    if isinstance(named, Judge):
        if options:
            raise ValueError(f"extra_litellm_params ({', '.join(options)}) are not for a judge that is made already; "
                             "give them to it: UrlJudge(..., options={...})")
        return named
    if not isinstance(named, str) or not named:
        raise TypeError(f"judge_model is {described(named)}; it must be a name such as 'openai/gpt-4o-mini', an "
                        "address that begins with http, or a judge: rewards.UrlJudge(...), model.judge()")
    if named == SELF:
        return judge_of_run()
    key = repr((named, sorted(options.items(), key=str)))
    if key not in made:
        made[key] = url_judge(named, options)
    made.move_to_end(key)
    while len(made) > KEPT:
        made.popitem(last=False)
    return made[key]


def judge_of_run() -> Judge:
    """Return the base model of the only model in training as a judge. ValueError if there is none, or several."""
    if len(OPEN) != 1:
        names = ", ".join(run.name for run in OPEN) or "register one first"
        raise ValueError(f"the judge 'self' is the base model of the model in training, and there are {len(OPEN)} "
                         f"({names}): give judge_model=model.judge()")
    return OPEN[0].judge()


def url_judge(named: str, options: dict[str, Any]) -> UrlJudge:
    """Return a judge at a URL, from LiteLLM's names and parameters. A key is sent only to the address given with it."""
    address = next((options.pop(name) for name in ADDRESSES if options.get(name)), None)
    key, model = options.pop("api_key", None), options.pop("model", None)
    if is_address(named):
        address, named = named, model or ""
        if not named:
            raise ValueError('a judge at an address needs the name of its model: extra_litellm_params={"model": "..."}')
    elif model is not None:
        raise ValueError('extra_litellm_params names a "model"; judge_model is its place')
    provider, _, rest = named.partition("/")
    if provider == OPENAI or (provider in AT_AN_ADDRESS and address):
        named = rest
    elif address is None and rest:
        raise ValueError(f"the address of {provider!r} is not known here: give it, with its key, extra_litellm_params="
                         '{"base_url": "https://...", "api_key": "..."}')
    if address is not None and key is None:
        raise ValueError(f"{named!r} at an address of its own needs a key, extra_litellm_params={{'api_key': ...}}; a "
                         "server of yours takes any text. OPENAI_API_KEY is sent to OpenAI only")
    settings = {ours: options.pop(name) for name, ours in OF_THE_JUDGE.items() if name in options}
    return UrlJudge(address, named, key, options=options or None, **settings)


class EngineJudge(SelfJudge):
    """The base model, without adapter, as a judge. The worker that owns the engine runs it between rollouts' turns."""

    after_sampling = False
    rate: Any

    def __init__(self, worker: Any, model: Any, **options: Any) -> None:
        """`model` comes from FastLanguageModel, and `worker` is its EngineWorker. SelfJudge gets the `options`."""
        loaded = copy.copy(model.loaded)
        loaded.tokenizer = copy.deepcopy(loaded.tokenizer)  # it is used in other threads
        super().__init__(SimpleNamespace(loaded=loaded, inner=model.inner), **options)
        self.worker, self.lock = worker, threading.Lock()

    async def rate(self, questions: list[Question]) -> Round:  # type: ignore[no-redef]
        return await asyncio.to_thread(super().rate, questions)

    def encode(self, question: Question, fault: str | None, now: Round) -> list[int] | None:
        with self.lock:
            return super().encode(question, fault, now)

    def generate(self, prompts: list[list[int]], params: Any) -> list[Any]:
        futures = [self.worker.submit(EngineCall(ids, params, adapter=None)) for ids in prompts]
        return [[future.result()] for future in futures]
