"""Recipe `countdown`: reach a target from given numbers with + - * /. The puzzles are generated; three rewards.

    lowmem-grpo run countdown                                       # model and settings fit the card, or gpu=24
    lowmem-grpo run countdown max_numbers=3 largest_number=20       # easier puzzles

Puzzles that the model never solves teach it nothing: begin with easy ones. On a CPU the recipe uses the embedded tiny
model, which cannot learn this task: the run then only shows in a minute that everything works.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.recipes.presets import Preset, Presets, prepare
from lowmem_grpo.recipes.problems.countdown import Difficulty, allowed, answer_text, countdowns, evaluate
from lowmem_grpo.recipes.problems.splits import take
from lowmem_grpo.rewards.texts import completion_text

DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/countdown", "seed": 0, "max_steps": 200, "learning_rate": 1e-5, "max_completion_length": 640,
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "num_generations": 8, "loss_type": "dr_grpo",
    "scale_rewards": "none", "adam_beta2": 0.99, "max_grad_norm": 0.2, "warmup_ratio": 0.05,
    "lr_scheduler_type": "linear", "save_steps": 25, "save_total_limit": 2,
}
PRESETS: Presets = {
    "cpu": Preset("tiny", 1024, 32, 64,
                  {"max_steps": 10, "max_completion_length": 64, "gradient_accumulation_steps": 2}),
    "16": Preset("Qwen/Qwen2.5-1.5B-Instruct", 1024, 32, 64, {"optim": "paged_adamw_8bit"}),
    "24": Preset("Qwen/Qwen2.5-3B-Instruct", 1024, 32, 64, {"optim": "paged_adamw_8bit"}),
    "48": Preset("Qwen/Qwen2.5-7B-Instruct", 1280, 32, 64, {"max_completion_length": 896, "optim": "paged_adamw_8bit"}),
    "80": Preset("meta-llama/Llama-3.1-8B-Instruct", 1536, 64, 128,
                 {"max_completion_length": 1152, "optim": "adamw_8bit"}),
}


@dataclass
class CountdownOptions(RecipeOptions):
    train_size: int = 4096
    """Problems to train on."""
    eval_problems: int = 256
    """Held-out problems that are answered before and after training."""
    min_numbers: int = 3
    """Fewest given numbers."""
    max_numbers: int = 4
    """Most given numbers."""
    largest_number: int = 50
    """Largest given number."""
    largest_target: int = 99
    """Largest target."""
    operators: str = "+-*/"
    """Operators that a solution may use."""

    @property
    def difficulty(self) -> Difficulty:
        """Which puzzles are drawn. Raises ValueError for settings that make none."""
        return Difficulty(self.min_numbers, self.max_numbers, self.largest_number, self.largest_target, self.operators)


OPTIONS = CountdownOptions


def make_dataset(split: str, size: int, seed: int = 0, difficulty: Difficulty | None = None) -> Dataset:
    """`size` different puzzles of a split ("train" or "test"). Columns: `prompt`, `answer` (one of several solutions),
    `numbers`, `target`."""
    return Dataset.from_list([
        {"prompt": [{"role": "user", "content": puzzle.question}], "answer": puzzle.solution,
         "numbers": list(puzzle.numbers), "target": puzzle.target}
        for puzzle in take(countdowns(split, seed, difficulty), size)
    ])


def reaches_target(completions: list[Any], numbers: list[list[int]], target: list[int], **kwargs: Any) -> list[float]:
    """1 where the expression after the last `Answer:` makes the target from the given numbers."""
    rows = zip(completions, numbers, target, strict=True)
    return [float(solves(completion_text(completion), own, wanted)) for completion, own, wanted in rows]


def solves(text: str, numbers: list[int], target: int) -> bool:
    answer = evaluate(answer_text(text))
    return answer is not None and answer.value == target and allowed(answer, numbers)


def given_numbers(completions: list[Any], numbers: list[list[int]], **kwargs: Any) -> list[float]:
    """0.1 where that expression uses at least two of the given numbers, each at most once, and no others."""
    answers = [evaluate(answer_text(completion_text(completion))) for completion in completions]
    return [0.1 * (answer is not None and answer.numbers.total() > 1 and allowed(answer, own))
            for answer, own in zip(answers, numbers, strict=True)]


def answer_line(completions: list[Any], **kwargs: Any) -> list[float]:
    """0.1 where the last line is `Answer: ` and an expression, and nothing else."""
    last_lines = [completion_text(completion).strip().rpartition("\n")[2] for completion in completions]
    return [0.1 * (line.startswith("Answer: ") and evaluate(line.removeprefix("Answer: ")) is not None)
            for line in last_lines]


EXAM = Exam(lambda size, seed, source: make_dataset("test", size, seed), reaches_target, max_tokens=640)
REWARDS: list[Callable[..., Any]] = [reaches_target, given_numbers, answer_line]


def run(options: CountdownOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    seed, difficulty = setup.config.seed, options.difficulty
    teach(setup, Lesson("countdown", make_dataset("train", options.train_size, seed, difficulty), REWARDS,
                        make_dataset("test", options.eval_problems, seed, difficulty), reaches_target,
                        note=setup.tiny_note("does not know countdown")))
