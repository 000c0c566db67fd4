"""Recipe `new_tokens`: a model learns what three new tokens mean: to add, to subtract and to multiply.

    lowmem-grpo run new_tokens                                   # on a CPU: the embedded tiny model, in minutes
    lowmem-grpo run new_tokens learning_rate=1e-12 lora_rank=1   # LoRA stays as it is: only the tokens' rows learn

The rows begin as the same mean of all rows, so nothing else tells the tokens apart. SFT on solved problems comes before
GRPO, as a model that sees no difference samples none.
"""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset

from lowmem_grpo.recipes.arithmetic import correct_answer
from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.lesson import Lesson, WarmUp, teach
from lowmem_grpo.recipes.options import ProblemOptions
from lowmem_grpo.recipes.presets import USUAL, Preset, Presets, on_cards, prepare
from lowmem_grpo.recipes.tasks import take
from lowmem_grpo.recipes.tasks.arithmetic import MAX_STEPS, Problem, problems
from lowmem_grpo.rewards.texts import completion_text
from lowmem_grpo.utils import at_least

TOKENS = {"+": " <|plus|>", "-": " <|minus|>", "*": " <|times|>"}  # with the space before them, as words have it
FORM = " Write each step on a line of its own, such as 4 + 3 = 7, and then Answer: and the result."  # for hub models
RATES, TIMES = ("learning_rate", "embedding_learning_rate"), 3  # SFT has three times GRPO's
DEFAULTS = USUAL | {
    "output_dir": "runs/new_tokens", "max_steps": 100, "embedding_learning_rate": 1e-3, "max_completion_length": 256,
}
PRESETS: Presets = {
    "cpu": Preset("tiny", 128, 16, 32, {
        "max_steps": 10, "learning_rate": 1e-3, "embedding_learning_rate": 1e-2, "max_completion_length": 64,
        "per_device_train_batch_size": 64, "gradient_accumulation_steps": 4, "max_grad_norm": 1.0, "save_steps": 5,
    }),
} | on_cards(1024)


@dataclass
class NewTokensOptions(ProblemOptions):
    sft_steps: int = 100
    """The number of SFT steps on solved problems before GRPO."""

    RANGES = ProblemOptions.RANGES | {"sft_steps": at_least(0)}


OPTIONS = NewTokensOptions


def question(problem: Problem) -> str:
    """Write a problem with the new tokens in place of verbs: `Start with 17. <|plus|> 8. What is the result?`"""
    steps = "".join(f"{TOKENS[operator]} {operand}." for operator, operand in problem.steps)
    return f"Start with {problem.start}.{steps} What is the result?"


def has_all(problem: Problem) -> bool:
    """Return whether a problem has all operators, in so many steps that few are guessed."""
    return len(problem.steps) == MAX_STEPS and {operator for operator, _ in problem.steps} == {*TOKENS}


def make_dataset(split: str, size: int, seed: int = 0, form: str = "") -> Dataset:
    """Return `size` different problems of a split, with columns `prompt`, `completion` (a solution), `answer` and
    `lines`."""
    return Dataset.from_list([
        {"prompt": [{"role": "user", "content": question(problem) + form}],
         "completion": "\n".join([*problem.lines, f"Answer: {problem.answer}"]), "answer": str(problem.answer),
         "lines": problem.lines}
        for problem in take(filter(has_all, problems(split, seed)), size)
    ])


def right_steps(completions: list[Any], lines: list[list[str]], **kwargs: Any) -> list[float]:
    """Return for each completion the share of its problem's steps that it writes, up to the first wrong one."""
    shares = []
    for completion, right in zip(completions, lines, strict=True):
        written = re.findall(r"\d+ [-+*] \d+ = \d+", completion_text(completion))
        same = [*map(str.__eq__, written, right), False]
        shares.append(same.index(False) / len(right))
    return shares


def make_exam(form: str) -> Any:
    return lambda size, seed, source: make_dataset("test", size, seed, form)


EXAM = Exam(make_exam(FORM), correct_answer, max_tokens=256, of_tiny=make_exam(""), tiny_max_tokens=64)


def run(options: NewTokensOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    form, seed = "" if setup.is_tiny else FORM, setup.config.seed
    rates = {name: TIMES * rate for name in RATES if (rate := getattr(setup.config, name))}
    warm_up = WarmUp(partial(make_dataset, "train", form=form), options.sft_steps, "Answer: N",
                     lambda text: "Answer: " in text, rates | {"per_device_train_batch_size": 16, "adam_beta2": 0.99})
    teach(setup, Lesson("new_tokens", make_dataset("train", options.train_size, seed, form),
                        [correct_answer, right_steps], make_dataset("test", options.eval_problems, seed, form),
                        correct_answer, warm_up=warm_up if options.sft_steps else None,
                        new_tokens=tuple(TOKENS.values())))
