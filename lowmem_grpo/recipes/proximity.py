"""Recipe `proximity`: teach a new answer format by SFT, then train with GRPO and higher rewards for closer answers.

    lowmem-grpo run proximity                       # model and settings fit the card, or gpu=24
    lowmem-grpo run proximity sft_steps=0           # without SFT: does the model discover the format?

A hub model learns <start_working_out>...<end_working_out><SOLUTION>...</SOLUTION> on word problems with large numbers.
On a CPU, the embedded tiny model learns to write `Answer = 36` instead of `Answer: 36` on the problems of `arithmetic`.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset

from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.lesson import Lesson, WarmUp, teach
from lowmem_grpo.recipes.options import ProblemOptions
from lowmem_grpo.recipes.presets import USUAL, Preset, Presets, on_cards, prepare
from lowmem_grpo.recipes.tasks import arithmetic as arithmetic_problems
from lowmem_grpo.recipes.tasks import distinct, take
from lowmem_grpo.rewards.reading import Finder, after, in_tag, last_line
from lowmem_grpo.rewards.ready.answers import number_equal, number_match, proximity, regex_match
from lowmem_grpo.rewards.ready.formats import REASONING_TAGS, format_kept, format_match, tags_counted
from lowmem_grpo.rewards.reward import Reward, Verifier
from lowmem_grpo.utils import at_least

DEFAULTS = USUAL | {
    "output_dir": "runs/proximity", "max_steps": 150, "learning_rate": 5e-6, "max_completion_length": 512,
    "warmup_ratio": 0.05,
}
PRESETS: Presets = {
    "cpu": Preset("tiny", 128, 16, 32, {
        "max_steps": 30, "learning_rate": 1e-3, "max_completion_length": 64, "per_device_train_batch_size": 64,
        "gradient_accumulation_steps": 4, "max_grad_norm": 1.0, "warmup_ratio": 0.0, "save_steps": 10,
    }),
} | on_cards(1024) | {
    "48": Preset("Qwen/Qwen2.5-7B-Instruct", 1280, 32, 64, {"max_completion_length": 768, "optim": "paged_adamw_8bit"}),
    "80": Preset("meta-llama/Llama-3.1-8B-Instruct", 1536, 64, 128,
                 {"max_completion_length": 1024, "optim": "adamw_8bit"}),
}
GOODS = ("tea", "salt", "nails", "candles", "soap", "pencils", "rice", "buttons", "paint", "screws")
PARTS = {2: "Half", 3: "A third", 4: "A quarter", 5: "A fifth", 8: "An eighth"}
MIN_STEPS, MAX_STEPS = 4, 7
MIN_STOCK, MAX_STOCK = 50, 20_000  # boxes after each step


@dataclass(frozen=True)
class StockProblem:
    """A word problem about a warehouse's stock. Its numbers are large, because hub models solve small ones easily."""

    question: str
    lines: tuple[str, ...]  # a line of the worked solution for each step
    answer: int


Step = tuple[str, str, int]  # what happens, the calculation, and the stock after it


def arrive(rng: random.Random, stock: int) -> Step:
    carts, boxes = rng.randint(6, 48), rng.randint(12, 96)
    return (f"{carts} carts of {boxes} boxes each arrive.", f"{stock} + {carts} * {boxes}", stock + carts * boxes)


def sell_part(rng: random.Random, stock: int) -> Step:
    part = rng.choice([part for part in PARTS if stock % part == 0] or [1])
    if part == 1:
        return sell(rng, stock)
    return f"{PARTS[part]} of all boxes is sold.", f"{stock} - {stock} / {part}", stock - stock // part


def sell(rng: random.Random, stock: int) -> Step:
    boxes = rng.randint(11, max(11, stock // 2))
    return f"{boxes} boxes are sold.", f"{stock} - {boxes}", stock - boxes


def throw_away(rng: random.Random, stock: int) -> Step:
    crates, boxes = rng.randint(2, 9), rng.randint(6, 36)
    return (f"{crates} shelves with {boxes} boxes each get wet and are thrown away.",
            f"{stock} - {crates} * {boxes}", stock - crates * boxes)


def multiply(rng: random.Random, stock: int) -> Step:
    times = rng.randint(2, 4)
    word = {2: "twice", 3: "three times", 4: "four times"}[times]
    return (f"Another warehouse sends {word} as many boxes as there are now.",
            f"{stock} + {times} * {stock}", stock * (1 + times))


EVENTS = (arrive, sell_part, sell, throw_away, multiply)


def draw_problem(rng: random.Random) -> StockProblem:
    """Draw a problem whose stock stays between MIN_STOCK and MAX_STOCK."""
    start = stock = rng.randint(100, 2000)
    story, lines = [], []
    for _ in range(rng.randint(MIN_STEPS, MAX_STEPS)):
        said, sum_of_it, after = draw_step(rng, stock)
        story.append(said)
        lines.append(f"{sum_of_it} = {after}")
        stock = after
    goods = rng.choice(GOODS)
    question = f"A warehouse holds {start} boxes of {goods}. {' '.join(story)} How many boxes are left?"
    return StockProblem(question, tuple(lines), stock)


def draw_step(rng: random.Random, stock: int) -> Step:
    """Draw a step after which the stock is between MIN_STOCK and MAX_STOCK."""
    while True:
        step = rng.choice(EVENTS)(rng, stock)
        if MIN_STOCK <= step[2] <= MAX_STOCK:
            return step


@dataclass(frozen=True)
class Task:
    """Problems, and the format that answers should have."""

    problems: Callable[[str, int], Iterator[Any]]
    """(split, seed) -> different problems with `question`, `answer` and `lines` (the worked solution)."""
    system: str
    form: str  # the end of a solution, as messages show it
    solution: Callable[[Iterable[str], int], str]  # (lines, answer) -> a solution in the format
    place: Finder  # where the answer stands
    kept: Verifier  # says whether a completion has the format
    pays: list[Reward]  # rewards for the format
    sft: dict[str, Any]  # settings of fine-tuning

    def prompt(self, question: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": question}]

    def has_form(self, text: str) -> bool:
        return bool(self.kept.verify(text))


OPEN, CLOSE, ANSWER, END = REASONING_TAGS
WORDS = Task(
    lambda split, seed: distinct(split, seed, draw_problem, lambda problem: problem.question),
    f"You are given a problem. Think about it and show your work between {OPEN} and {CLOSE}. Then give the number that "
    f"is asked for, and nothing else, between {ANSWER} and {END}.", f"{ANSWER}N{END}",
    lambda lines, answer: "\n".join([OPEN, *lines, CLOSE, f"{ANSWER}{answer}{END}"]), in_tag(ANSWER, END),
    format_match(), [format_kept(0.5), tags_counted(0.1, 0.0)],
    {"learning_rate": 2e-4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "warmup_ratio": 0.1},
)
STEPS = Task(arithmetic_problems.problems, "", "Answer = N", lambda lines,
             answer: "\n".join([*lines, f"Answer = {answer}"]), after("Answer ="),
             regex_match(r"Answer = \d+", last_line),
             [regex_match(r"Answer = \d+", last_line).reward(0.1, name="answer_line")],
             {"learning_rate": 5e-3, "per_device_train_batch_size": 16, "adam_beta2": 0.99, "logging_steps": 5})


@dataclass
class ProximityOptions(ProblemOptions):
    sft_steps: int = 15
    """The number of SFT steps before GRPO; 0 skips SFT."""

    RANGES = ProblemOptions.RANGES | {"sft_steps": at_least(0)}


OPTIONS = ProximityOptions


def make_dataset(split: str, size: int, seed: int = 0, task: Task = WORDS) -> Dataset:
    """Return `size` different problems of a split ("train" or "test"), with columns `prompt` and `answer`."""
    return Dataset.from_list([
        {"prompt": task.prompt(problem.question), "answer": str(problem.answer)}
        for problem in take(task.problems(split, seed), size)
    ])


def make_demonstrations(size: int, seed: int = 0, task: Task = WORDS) -> Dataset:
    """Return `size` different training problems, with columns `prompt` and `completion` (a solution in the format)."""
    return Dataset.from_list([
        {"prompt": task.prompt(problem.question), "completion": task.solution(problem.lines, problem.answer)}
        for problem in take(task.problems("train", seed), size)
    ])


def rewards(task: Task) -> list[Reward]:
    """Return the format's rewards, and up to 1 for a near answer, 1 more for an exact one, -0.5 for an outlier."""
    return [*task.pays, proximity(exact=1.0, outlier=-0.5, where=task.place),
            number_equal(right=1.0, wrong=0.0, where=task.place)]


RIGHT = number_match().reward()  # the last number, in the format or not; the share in the format is measured separately
EXAM = Exam(lambda size, seed, source: make_dataset("test", size, seed), RIGHT, max_tokens=512, of_tiny=lambda size,
            seed, source: make_dataset("test", size, seed, STEPS))


def run(options: ProximityOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    task, seed = STEPS if setup.is_tiny else WORDS, setup.config.seed
    warm_up = WarmUp(partial(make_demonstrations, task=task), options.sft_steps, task.form, task.has_form, task.sft)
    teach(setup, Lesson("proximity", make_dataset("train", options.train_size, seed, task), rewards(task),
                        make_dataset("test", options.eval_problems, seed, task), RIGHT,
                        warm_up=warm_up if options.sft_steps else None))
