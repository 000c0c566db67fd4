"""Recipe `judge`: summaries, scored by a judge that compares all summaries of a report (RULER). It needs no labels.

    lowmem-grpo run judge                                                   # the base model itself judges
    lowmem-grpo run judge judge=http://127.0.0.1:8000/v1 judge_model=NAME judge_key=local     # your own server
    lowmem-grpo run judge judge=https://api.openai.com/v1 judge_model=NAME  # with the key in OPENAI_API_KEY

Summaries that are too long get a small penalty. The share of kept facts is logged with weight 0, as a check of the
judge: `rewards/facts_kept/mean` should climb with `rewards/ruler/mean`. On a CPU, the embedded tiny model cannot judge:
no group gets a gradient, and the run ends with an error that says so. See docs/judge.md.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset

from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.recipes.presets import USUAL, Preset, Presets, Setup, on_cards, prepare
from lowmem_grpo.recipes.tasks import distinct, take
from lowmem_grpo.rewards.calling.contract import RewardError
from lowmem_grpo.rewards.judge.judge import Judge, ruler
from lowmem_grpo.rewards.judge.self_judge import SelfJudge
from lowmem_grpo.rewards.ready.formats import too_long
from lowmem_grpo.rewards.texts import completion_texts
from lowmem_grpo.trainer.lifecycle import update_summary
from lowmem_grpo.utils import matching, require

SELF = "self"
TOKENS_OF_A_REPLY = {True: 32, False: 768}  # for an embedded model, whose replies make no sense, and for others
WORDS_ALLOWED = 40
QUESTION = (
    "Sum up this report in one paragraph of at most {words} words. Keep every number and every name.\n\n{report}"
)
PLACES = ("Aldermouth", "Brackwater", "Cindervale", "Dunmarsh", "Eastholm", "Fernwick", "Greyford", "Hollowmere",
          "Ivybridge", "Kettlesham", "Larkfield", "Mossgate", "Northwold", "Otterbourne", "Pinecrest", "Ravensby")
MONTHS = ("January", "April", "June", "September", "October", "November")
GOODS = ("timber", "salt", "wool", "copper", "barley", "slate", "cement", "paper")
FILLER = ("As in other years, the figures were awaited with some interest.",
          "Opinions on what this means for the time to come differ.",
          "A longer version of this report can be read at the town hall.",
          "The weather was neither better nor worse than usual at that time of the year.",
          "Nobody wished to comment on details, which are still being looked at.",
          "Those who took part were thanked for their patience.")
KINDS = (
    ("The harbour of {place} published its figures for {month}.",
     "{a} ships called there, {b} more than a year before.",
     "They unloaded {c} tons of {goods}.", "Repairs of the northern quay cost {d} crowns."),
    ("The mill of {place} had an unusual {month}.",
     "It worked on {a} shifts and used {c} tons of {goods}.",
     "{b} machines stood still because of a broken belt.", "The new belt cost {d} crowns."),
    ("In {month} the railway opened its new line to {place}.",
     "{c} passengers travelled on it in the first week, on {a} trains.",
     "{b} of these trains were late.", "A wagon of {goods} that was lost on the way was worth {d} crowns."),
    ("The warehouse of {place} was counted in {month}.",
     "{c} sacks of {goods} were found on {a} shelves.",
     "{b} sacks were damp and had to go.", "The loss was put at {d} crowns."),
)
RANGES = {"a": (20, 99), "b": (3, 19), "c": (1100, 9900), "d": (120, 990)}  # disjoint: a report's numbers all differ


@dataclass(frozen=True)
class Report:
    """A report: the index of its kind in KINDS, and its facts. Its text has filler sentences among the facts."""

    kind: int
    place: str
    month: str
    goods: str
    a: int
    b: int
    c: int
    d: int

    @property
    def facts(self) -> tuple[str, ...]:
        return (self.place, self.month, self.goods, str(self.a), str(self.b), str(self.c), str(self.d))

    @property
    def text(self) -> str:
        told = [sentence.format(**vars(self)) for sentence in KINDS[self.kind]]
        rng = random.Random(repr(self))
        for sentence in rng.sample(FILLER, 3):
            told.insert(rng.randint(1, len(told)), sentence)
        return " ".join(told)

    @property
    def question(self) -> str:
        return QUESTION.format(words=WORDS_ALLOWED, report=self.text)

    @property
    def summary(self) -> str:
        """A summary that keeps every fact, in fewer words."""
        return f"{self.place}, {self.month}: {' '.join(KINDS[self.kind][1:])}".format(**vars(self))


def draw_report(rng: random.Random) -> Report:
    numbers = {name: rng.randint(*bounds) for name, bounds in RANGES.items()}
    return Report(rng.randrange(len(KINDS)), rng.choice(PLACES), rng.choice(MONTHS), rng.choice(GOODS), **numbers)


def share_kept(text: str, facts: list[str]) -> float:
    """Return the share of facts that a text contains as whole words or numbers; 1,240 counts as 1240."""
    plain = re.sub(r"(?<=\d)[, ](?=\d{3}\b)", "", text).lower()
    words = set(re.findall(r"\d+|[^\W\d_]+", plain))
    return sum(fact.lower() in words for fact in facts) / len(facts)


ENOUGH = 0.85  # a summary with this share of the facts counts as right
RUBRIC = f"""\
- A good summary keeps every number and name of the report, each attached to what it belongs to, and adds none.
- Every fact that is left out or wrong lowers the score; of two with the same facts, the more readable one is better.
- A copy of the report, a list of fragments, or more than {WORDS_ALLOWED} words scores low."""
DEFAULTS = USUAL | {
    "output_dir": "runs/judge", "max_steps": 100, "max_completion_length": 128, "warmup_ratio": 0.05,
    "reward_weights": [1.0, 0.2, 0.0],  # the judge, the penalty for length, and a share that is only logged
}
PRESETS: Presets = {
    "cpu": Preset("tiny", 2048, 16, 32, {
        "max_steps": 3, "max_completion_length": 24, "num_generations": 4, "gradient_accumulation_steps": 1,
    }),
} | on_cards(2560)


@dataclass
class JudgeOptions(RecipeOptions):
    """The options that choose the judge."""

    judge: str = SELF
    """The judge: "self" (the base model of the run) or the address of an OpenAI-compatible server."""
    judge_model: str | None = None
    """The name of the judge model on the server."""
    judge_key: str | None = None
    """The server's API key. None: the variable OPENAI_API_KEY. If the server checks no key, give any text."""

    RANGES = RecipeOptions.RANGES | {
        "judge": matching('"self", or an address that begins with http:// or https://', "self|https?://.+")}

    def url_judge(self) -> Judge | None:
        """Return the judge on a server; None if the base model judges. Raises ValueError for options that conflict."""
        if self.judge == SELF:
            extra = [name for name in ("judge_model", "judge_key") if getattr(self, name) is not None]
            if extra:
                raise ValueError(f"{extra[0]} is for a judge at an address: give judge=http://... with it")
            return None
        require("judge", self.judge, self.RANGES["judge"])
        if self.judge_model is None:
            raise ValueError("judge_model is missing: the name by which the server knows its model")
        from lowmem_grpo.rewards.judge.url_judge import UrlJudge  # it needs the package openai

        return UrlJudge(self.judge, self.judge_model, self.judge_key)

    def self_judge(self, model: FastPeftModel, setup: Setup) -> SelfJudge:
        return SelfJudge(model, max_tokens=TOKENS_OF_A_REPLY[setup.is_tiny])


@dataclass
class SummaryOptions(JudgeOptions):
    train_size: int = 2048
    """The number of training reports."""
    eval_problems: int = 128
    """The number of held-out reports in each evaluation."""


OPTIONS = SummaryOptions


def make_dataset(split: str, size: int, seed: int = 0) -> Dataset:
    """Return `size` different reports of a split, with `prompt`, `answer` (one good summary) and `facts`."""
    return Dataset.from_list([
        {"prompt": [{"role": "user", "content": report.question}], "answer": report.summary,
         "facts": list(report.facts)}
        for report in take(distinct(split, seed, draw_report, repr), size)
    ])


def facts_kept(completions: list[Any], facts: list[list[str]], **kwargs: Any) -> list[float]:
    """Return the share of a report's numbers and names that each summary keeps."""
    return [share_kept(text, wanted) for text, wanted in zip(completion_texts(completions), facts, strict=True)]


def good_summary(completions: list[Any], facts: list[list[str]], **kwargs: Any) -> list[float]:
    """Return 1 where a summary keeps ENOUGH of the facts in at most WORDS_ALLOWED words, else 0."""
    shares = facts_kept(completions, facts)
    return [float(share >= ENOUGH and len(text.split()) <= WORDS_ALLOWED)
            for share, text in zip(shares, completion_texts(completions), strict=True)]


EXAM = Exam(lambda size, seed, source: make_dataset("test", size, seed), good_summary, max_tokens=128, size=128)


def run(options: SummaryOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    teach_judged(options, setup, Lesson(
        "judge", make_dataset("train", options.train_size, setup.config.seed), [],
        make_dataset("test", options.eval_problems, setup.config.seed), good_summary,
        note=setup.tiny_note("can neither summarize nor judge"),
    ), RUBRIC, [too_long(WORDS_ALLOWED, "words"), facts_kept])


def teach_judged(
    options: JudgeOptions, setup: Setup, lesson: Lesson, rubric: str, others: list[Callable[..., Any]]
) -> None:
    """Teach a lesson with RULER and the `others` as rewards, and print the cost of judging. ValueError for wrong judge
    options; RewardError, after all results are written, if the judge gave no usable score."""
    url_judge = options.url_judge()
    judges: list[Judge] = []

    def rewards(model: FastPeftModel) -> list[Any]:
        judges.append(url_judge or options.self_judge(model, setup))
        return [ruler(judges[0], rubric), *others]

    trainer = teach(setup, replace(lesson, rewards=rewards, facts=lesson.facts | {"judge": options.judge}))
    update_summary(trainer, {"judging": vars(judges[0].meter)})
    print(judges[0].summary())
    meter = judges[0].meter
    if meter.failed == meter.calls > 0:
        raise RewardError(f"the judge ({options.judge}) gave no usable score in {meter.calls} calls, so nothing was "
                         "learned: take a model that can judge, or a server's with judge=http://... (docs/judge.md)")
