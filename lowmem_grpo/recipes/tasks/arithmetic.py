"""Multi-step arithmetic problems, generated with exact answers.

    Start with 17. Add 8. Subtract 13. Multiply by 3. What is the result?

    17 + 8 = 25
    25 - 13 = 12
    12 * 3 = 36
    Answer: 36
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lowmem_grpo.recipes.tasks import distinct

MAX_TOTAL = 99  # every intermediate total lies in [0, MAX_TOTAL]
MIN_STEPS, MAX_STEPS = 2, 4
VERBS = {"+": "Add {}.", "-": "Subtract {}.", "*": "Multiply by {}."}
QUESTION = re.compile(r"Start with \d+\.( (Add|Subtract|Multiply by) \d+\.)+ What is the result\?")


@dataclass(frozen=True)
class Problem:
    """A start value and steps (operator, operand), applied from left to right."""

    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def question(self) -> str:
        verbs = " ".join(VERBS[operator].format(operand) for operator, operand in self.steps)
        return f"Start with {self.start}. {verbs} What is the result?"

    @property
    def totals(self) -> list[int]:
        return list(accumulate(self.steps, apply_step, initial=self.start))[1:]

    @property
    def lines(self) -> list[str]:
        totals = [self.start, *self.totals]
        return [f"{total} {operator} {operand} = {result}"
                for (total, result), (operator, operand) in zip(pairwise(totals), self.steps, strict=True)]

    @property
    def answer(self) -> int:
        return self.totals[-1]


def apply_step(total: int, step: tuple[str, int]) -> int:
    operator, operand = step
    return {"+": total + operand, "-": total - operand, "*": total * operand}[operator]


def draw_problem(rng: random.Random) -> Problem:
    """Draw a problem of MIN_STEPS to MAX_STEPS steps whose totals all lie in [0, MAX_TOTAL]."""
    start = total = rng.randint(1, MAX_TOTAL)
    steps: list[tuple[str, int]] = []
    for _ in range(rng.randint(MIN_STEPS, MAX_STEPS)):
        steps.append(draw_step(rng, total))
        total = apply_step(total, steps[-1])
    return Problem(start, tuple(steps))


def draw_step(rng: random.Random, total: int) -> tuple[str, int]:
    """Draw a step that keeps the total within [0, MAX_TOTAL]. A factor is 2 to 5, or less if the total is large."""
    possible = {"+": total < MAX_TOTAL, "-": total > 0, "*": 0 < total <= MAX_TOTAL // 2}
    operator = rng.choice([operator for operator in possible if possible[operator]])
    if operator == "+":
        return operator, rng.randint(1, min(49, MAX_TOTAL - total))
    if operator == "-":
        return operator, rng.randint(1, min(49, total))
    return operator, rng.randint(2, min(5, MAX_TOTAL // total))


def problems(split: str, seed: int) -> Iterator[Problem]:
    """Yield different problems of one split, practically without end."""
    return distinct(split, seed, draw_problem, lambda problem: problem.question)


def last_integer(text: str) -> int | None:
    """Return the last integer in `text`; None if there is none, or if it is longer than 12 characters."""
    numbers = re.findall(r"-?\d+", text)
    return int(numbers[-1]) if numbers and len(numbers[-1]) <= 12 else None
