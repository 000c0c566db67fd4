"""Recipe `calculator`: learn to call a tool. The dataset has arithmetic problems; the tool is a calculator.

    lowmem-grpo run calculator                      # the embedded model of the games, in minutes on two CPU cores
    lowmem-grpo eval runs/calculator --recipe calculator
"""

import random

from datasets import Dataset

from lowmem_grpo.recipes.arithmetic import correct_answer
from lowmem_grpo.recipes.countdown import evaluate
from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import ProblemOptions
from lowmem_grpo.recipes.presets import USUAL, Preset, Presets, on_cards, prepare
from lowmem_grpo.recipes.tasks import distinct, take
from lowmem_grpo.trainer.play import Play

DEFAULTS = USUAL | {
    "output_dir": "runs/calculator", "max_steps": 50, "learning_rate": 5e-6, "max_completion_length": 512,
    "max_turns": 3,
}
PRESETS: Presets = {
    "cpu": Preset("tiny-games", 256, 16, 32, {
        "max_steps": 40, "learning_rate": 2e-3, "max_completion_length": 96, "max_turn_tokens": 32,
        "per_device_train_batch_size": 128, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "save_steps": 10,
    }),
} | on_cards(1024)
SMALLEST, LARGEST = 10, 99


def draw_sum(rng: random.Random) -> str:
    """Draw two two-digit numbers and an operator; half of the problems are products, and no result is negative."""
    right, left = sorted(rng.randint(SMALLEST, LARGEST) for _ in range(2))
    return f"{left} {rng.choice('+-**')} {right}"


def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Whole numbers, + - * / and parentheses, for example "12 * (3 + 4)".

    Returns:
        The value: a whole number, or a fraction such as 7/3.
    """
    answer = evaluate(expression)
    if answer is None:
        raise ValueError(f"{expression[:60]!r} is no expression of whole numbers, + - * / and parentheses")
    return str(answer.value)


OPTIONS = ProblemOptions
PLAY = Play(tools=[calculate], settings={"max_turns": DEFAULTS["max_turns"]})


def make_dataset(split: str, size: int, seed: int = 0) -> Dataset:
    """Return `size` different problems of a split ("train" or "test"), with columns `prompt` and `answer`."""
    return Dataset.from_list([
        {"prompt": [{"role": "user", "content": f"What is {problem}?"}], "answer": calculate(problem)}
        for problem in take(distinct(split, seed, draw_sum, str), size)
    ])


EXAM = Exam(lambda size, seed, source: make_dataset("test", size, seed), correct_answer, max_tokens=512, play=PLAY)


def run(options: ProblemOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    seed = setup.config.seed
    teach(setup, Lesson("calculator", make_dataset("train", options.train_size, seed), [correct_answer],
                        make_dataset("test", options.eval_problems, seed), correct_answer, play=PLAY))
