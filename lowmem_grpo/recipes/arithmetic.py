"""Recipe `arithmetic`: teach the embedded tiny model multi-step arithmetic, in minutes on two CPU cores.

    lowmem-grpo run arithmetic
    lowmem-grpo run arithmetic loss_type=gspo scale_rewards=group       # another loss
"""

from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import ProblemOptions
from lowmem_grpo.recipes.presets import Preset, Presets, prepare
from lowmem_grpo.recipes.tasks import take
from lowmem_grpo.recipes.tasks.arithmetic import last_integer, problems
from lowmem_grpo.rewards.texts import completion_text

DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/arithmetic", "seed": 0, "max_steps": 60, "learning_rate": 3e-3, "max_completion_length": 64,
    "per_device_train_batch_size": 64, "gradient_accumulation_steps": 4, "loss_type": "dr_grpo",
    "scale_rewards": "none", "optim": "adamw_torch", "adam_beta2": 0.99, "save_steps": 10, "save_total_limit": 2,
}
PRESETS: Presets = {"cpu": Preset("tiny", 128, 16, 32)}


@dataclass
class ArithmeticOptions(ProblemOptions):
    eval_problems: int = 512


OPTIONS = ArithmeticOptions


def make_dataset(split: str, size: int, seed: int = 0) -> Dataset:
    """Return `size` different problems of a split ("train" or "test"), with columns `prompt` and `answer`."""
    return Dataset.from_list([
        {"prompt": [{"role": "user", "content": problem.question}], "answer": str(problem.answer)}
        for problem in take(problems(split, seed), size)
    ])


def correct_answer(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """Return 1 for each completion whose last integer is the answer, else 0."""
    return [float(last_integer(completion_text(c)) == int(a)) for c, a in zip(completions, answer, strict=True)]


EXAM = Exam(lambda size, seed, source: make_dataset("test", size, seed), correct_answer, max_tokens=64, size=512)


def answer_line(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return 0.1 for each completion whose last line reads `Answer: <integer>`, else 0."""
    last_lines = [completion_text(c).strip().rpartition("\n")[2] for c in completions]
    return [0.1 * (line.startswith("Answer: ") and line.removeprefix("Answer: ").isdecimal()) for line in last_lines]


def make_lesson(options: ArithmeticOptions, seed: int) -> Lesson:
    return Lesson("arithmetic", make_dataset("train", options.train_size, seed), [correct_answer, answer_line],
                  make_dataset("test", options.eval_problems, seed), correct_answer)


def run(options: ArithmeticOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    teach(setup, make_lesson(options, setup.config.seed))
