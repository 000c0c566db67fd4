"""Recipe `countdown`: reach a target from given numbers with + - * /. The puzzles are generated; three rewards.

    lowmem-grpo run countdown                                       # model and settings fit the card, or gpu=24
    lowmem-grpo run countdown max_numbers=3 largest_number=20       # easier puzzles

Puzzles that the model never solves teach it nothing: begin with easy ones. On a CPU the recipe uses the embedded tiny
model, which cannot learn this task: the run then only shows in a minute that everything works.
"""

import ast
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

from datasets import Dataset

from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import ProblemOptions
from lowmem_grpo.recipes.presets import USUAL, Preset, Presets, on_cards, prepare
from lowmem_grpo.recipes.tasks import distinct, take
from lowmem_grpo.rewards.texts import completion_text
from lowmem_grpo.utils import check_ranges, matching, within

DEFAULTS = USUAL | {
    "output_dir": "runs/countdown", "max_steps": 200, "max_completion_length": 640, "warmup_ratio": 0.05,
}
PRESETS: Presets = {
    "cpu": Preset("tiny", 1024, 32, 64,
                  {"max_steps": 10, "max_completion_length": 64, "gradient_accumulation_steps": 2}),
} | on_cards(1024) | {
    "48": Preset("Qwen/Qwen2.5-7B-Instruct", 1280, 32, 64, {"max_completion_length": 896, "optim": "paged_adamw_8bit"}),
    "80": Preset("meta-llama/Llama-3.1-8B-Instruct", 1536, 64, 128,
                 {"max_completion_length": 1152, "optim": "adamw_8bit"}),
}
LARGEST_RESULT = 999  # bound of every intermediate result
OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
}
NODES: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
LONGEST = 120  # characters; a longer expression is not evaluated
FRUITLESS = 100_000  # draws in a row without a new puzzle, after which it is assumed that none is left
QUESTION = ("Make {target} from the numbers {numbers}. Use {operators} and parentheses, each number at most once. End "
            "with a line `Answer: ` and the expression.")


@dataclass
class CountdownOptions(ProblemOptions):
    """The bounds of the puzzles that are drawn. Raises ValueError for bounds that allow no puzzle."""

    min_numbers: int = 3
    """The fewest numbers in a puzzle."""
    max_numbers: int = 4
    """The most numbers in a puzzle."""
    largest_number: int = 50
    """The largest number in a puzzle."""
    largest_target: int = 99
    """The largest target."""
    operators: str = "+-*/"
    """The operators that the prompt allows."""

    RANGES = ProblemOptions.RANGES | {
        "min_numbers": within(2, 6), "max_numbers": within(2, 6), "largest_number": within(4, 99),
        "largest_target": within(4, LARGEST_RESULT),
        "operators": matching("some of +-*/, with + or *", "[-+*/]*[+*][-+*/]*"),
    }

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.min_numbers > self.max_numbers:
            raise ValueError(f"min_numbers is {self.min_numbers}, above max_numbers, which is {self.max_numbers}")


OPTIONS = CountdownOptions


@dataclass(frozen=True)
class Countdown:
    """Numbers, and a target that `solution` makes from them: two numbers at a time are combined until one is left.
    Every intermediate result is a positive integer."""

    numbers: tuple[int, ...]
    target: int
    operators: str = field(default="+-*/", compare=False)
    solution: str = field(default="", compare=False)

    @property
    def question(self) -> str:
        return QUESTION.format(target=self.target, numbers=", ".join(map(str, self.numbers)),
                               operators=" ".join(self.operators))

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """The sorted numbers and the target, so that the order of the numbers does not matter."""
        return tuple(sorted(self.numbers)), self.target


def possible_signs(left: int, right: int, operators: str) -> list[str]:
    """Return the operators that turn left >= right into a positive integer that differs from both."""
    rules = {"+": left + right <= LARGEST_RESULT, "-": left > right and left - right != right,
             "*": right > 1 and left * right <= LARGEST_RESULT,
             "/": right > 1 and left % right == 0 and left // right != right}
    return [sign for sign in operators if rules[sign]]


def combine(rng: random.Random, numbers: tuple[int, ...], operators: str) -> tuple[int, str] | None:
    """Combine all numbers in random order with random operators; return the value and the expression. None if no
    operator can combine a drawn pair."""
    terms = [(number, str(number)) for number in numbers]
    while len(terms) > 1:
        pair = sorted(rng.sample(terms, 2), key=lambda term: -term[0])
        (left, left_text), (right, right_text) = pair
        signs = possible_signs(left, right, operators)
        if not signs:
            return None
        sign = rng.choice(signs)
        value = int(OPERATORS[sign](Fraction(left), Fraction(right)))
        terms = [*(term for term in terms if term is not pair[0] and term is not pair[1]),
                 (value, f"({left_text} {sign} {right_text})")]
    return terms[0]


def draw_countdown(rng: random.Random, difficulty: CountdownOptions) -> Countdown | None:
    """Draw a puzzle whose target is not one of its numbers; None if the drawn numbers make no such puzzle."""
    size = rng.randint(difficulty.min_numbers, difficulty.max_numbers)
    numbers = tuple(rng.randint(1, difficulty.largest_number) for _ in range(size))
    target, solution = combine(rng, numbers, difficulty.operators) or (0, "")
    if not 0 < target <= difficulty.largest_target or target in numbers:
        return None
    return Countdown(numbers, target, difficulty.operators, ast.unparse(ast.parse(solution)))


def countdowns(split: str, seed: int, difficulty: CountdownOptions | None = None) -> Iterator[Countdown]:
    """Yield different puzzles of one split. ValueError if the bounds in `difficulty` allow no further puzzle."""
    chosen = difficulty or CountdownOptions()
    try:
        yield from distinct(split, seed, partial(draw_countdown, difficulty=chosen), lambda puzzle: repr(puzzle.key),
                            FRUITLESS)
    except ValueError as error:
        bounds = ", ".join(f"{name}={getattr(chosen, name)!r}" for name in chosen.__annotations__)
        raise ValueError(f"{error}, or allow other puzzles than those of {bounds}: more or fewer numbers, larger ones, "
                         "a larger target, or more operators") from None


@dataclass(frozen=True)
class Answer:
    """The exact value of an expression, and the numbers that it uses."""

    value: Fraction
    numbers: Counter[int]


def answer_text(text: str) -> str | None:
    """Return the rest of the line after the last `Answer:`, without Markdown or LaTeX marks; None without `Answer:`."""
    _, label, after = text.rpartition("Answer:")
    if not label:
        return None
    return after.partition("\n")[0].strip(" *`$\t\r").translate({ord("×"): "*", ord("÷"): "/", ord("−"): "-"})  # noqa: RUF001


def evaluate(expression: str | None) -> Answer | None:
    """Return the exact value of an expression of numbers, + - * / and parentheses, without running it as code. None for
    anything else, for a division by 0, and for more than LONGEST characters."""
    if expression is None or len(expression) > LONGEST or not re.fullmatch(r"[0-9+\-*/() ]+", expression):
        return None
    numbers: Counter[int] = Counter()
    try:
        value = value_of(ast.parse(expression.strip(), mode="eval").body, numbers)
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError):  # MemoryError: parentheses too deep
        return None
    return Answer(value, numbers)


def value_of(node: ast.expr, numbers: Counter[int]) -> Fraction:
    """Return the value of a part of an expression; count its numbers in `numbers`. ValueError for any other syntax."""
    match node:
        case ast.Constant(value=int(number)):
            numbers[number] += 1
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in NODES:
            return OPERATORS[NODES[type(op)]](value_of(left, numbers), value_of(right, numbers))
    raise ValueError(f"an answer may not contain a {type(node).__name__}")


def allowed(answer: Answer | None, numbers: list[int] | tuple[int, ...]) -> bool:
    """Return whether an answer uses only these numbers, each at most as often as it is listed."""
    return answer is not None and answer.numbers <= Counter(numbers)


def make_dataset(split: str, size: int, seed: int = 0, difficulty: CountdownOptions | None = None) -> Dataset:
    """Return `size` different puzzles of a split, with `prompt`, `answer` (one solution), `numbers` and `target`."""
    return Dataset.from_list([
        {"prompt": [{"role": "user", "content": puzzle.question}], "answer": puzzle.solution,
         "numbers": list(puzzle.numbers), "target": puzzle.target}
        for puzzle in take(countdowns(split, seed, difficulty), size)
    ])


def reaches_target(completions: list[Any], numbers: list[list[int]], target: list[int], **kwargs: Any) -> list[float]:
    """Return 1 where the expression after the last `Answer:` makes the target from the given numbers, else 0."""
    rows = zip(completions, numbers, target, strict=True)
    return [float(solves(completion_text(completion), own, wanted)) for completion, own, wanted in rows]


def solves(text: str, numbers: list[int], target: int) -> bool:
    answer = evaluate(answer_text(text))
    return answer is not None and answer.value == target and allowed(answer, numbers)


def given_numbers(completions: list[Any], numbers: list[list[int]], **kwargs: Any) -> list[float]:
    """Return 0.1 where the answer uses at least two of the given numbers, each at most once, and no others, else 0."""
    answers = [evaluate(answer_text(completion_text(completion))) for completion in completions]
    return [0.1 * (answer is not None and answer.numbers.total() > 1 and allowed(answer, own))
            for answer, own in zip(answers, numbers, strict=True)]


def answer_line(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return 0.1 where the last line is `Answer: ` and an expression, and nothing else; else 0."""
    last_lines = [completion_text(completion).strip().rpartition("\n")[2] for completion in completions]
    return [0.1 * (line.startswith("Answer: ") and evaluate(line.removeprefix("Answer: ")) is not None)
            for line in last_lines]


EXAM = Exam(lambda size, seed, source: make_dataset("test", size, seed), reaches_target, max_tokens=640,
            of_options=lambda options, tiny: {
                "problems": lambda size, seed, source: make_dataset("test", size, seed, options)})
REWARDS: list[Callable[..., Any]] = [reaches_target, given_numbers, answer_line]


def run(options: CountdownOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    seed = setup.config.seed
    teach(setup, Lesson("countdown", make_dataset("train", options.train_size, seed, options), REWARDS,
                        make_dataset("test", options.eval_problems, seed, options), reaches_target,
                        note=setup.tiny_note("does not know countdown")))
