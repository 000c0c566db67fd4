"""Options and training of recipes whose completions a language model judges."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.recipes.presets import Setup
from lowmem_grpo.rewards.calling.contract import RewardError
from lowmem_grpo.rewards.judge.judge import Judge
from lowmem_grpo.rewards.judge.judge_reward import ruler
from lowmem_grpo.rewards.judge.self_judge import SelfJudge
from lowmem_grpo.rewards.judge.url_judge import UrlJudge

SELF = "self"
TOKENS_OF_A_REPLY = {True: 32, False: 768}  # for an embedded model, whose replies make no sense, and for others


@dataclass
class JudgeOptions(RecipeOptions):
    """The options that choose the judge."""

    judge: str = SELF
    """"self": the base model, in the engine that samples; else the address of an OpenAI-compatible server."""
    judge_model: str | None = None
    """The name of the model on that server."""
    judge_key: str | None = None
    """Its API key; None is OPENAI_API_KEY. Your own server takes any text."""

    def url_judge(self) -> UrlJudge | None:
        """Return the judge on a server; None if the base model judges. Raises ValueError for options that conflict."""
        if self.judge == SELF:
            extra = [name for name in ("judge_model", "judge_key") if getattr(self, name) is not None]
            if extra:
                raise ValueError(f"{extra[0]} is for a judge at an address: give judge=http://... with it")
            return None
        if not self.judge.startswith(("http://", "https://")):
            raise ValueError(f'judge is {self.judge!r}; allowed are "self" and an address that begins with http')
        if self.judge_model is None:
            raise ValueError("judge_model is missing: the name by which the server knows its model")
        return UrlJudge(self.judge, self.judge_model, self.judge_key)

    def self_judge(self, model: FastPeftModel, setup: Setup) -> SelfJudge:
        """Return the base model as the judge."""
        return SelfJudge(model, max_tokens=TOKENS_OF_A_REPLY[setup.is_tiny])


def teach_judged(
    options: JudgeOptions, setup: Setup, lesson: Lesson, rubric: str, others: list[Callable[..., Any]]
) -> None:
    """Teach a lesson with two kinds of rewards: a judge that compares the completions of a group, then the `others`.
    Print the cost of judging. Raises ValueError for wrong judge options before anything is loaded, and RewardError,
    after all results are written, if no call to the judge gave a usable score."""
    url_judge = options.url_judge()
    judges: list[Judge] = []

    def rewards(model: FastPeftModel) -> list[Any]:
        judges.append(url_judge or options.self_judge(model, setup))
        return [ruler(judges[0], rubric), *others]

    trainer = teach(setup, replace(lesson, rewards=rewards, facts=lesson.facts | {"judge": options.judge}))
    trainer.finish({"judging": vars(judges[0].meter)})
    print(judges[0].summary())
    meter = judges[0].meter
    if meter.failed == meter.calls > 0:
        raise RewardError(f"the judge ({options.judge}) gave no usable score in {meter.calls} calls, so nothing was "
                         "learned: take a model that can judge, or a server's with judge=http://... (docs/judge.md)")
