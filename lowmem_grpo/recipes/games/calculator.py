"""Arithmetic that is too hard to do in one's head, and a tool that does it."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from lowmem_grpo.recipes.problems.countdown import evaluate
from lowmem_grpo.recipes.problems.splits import distinct

SIGNS = "+-*"
SMALLEST, LARGEST = 10, 99


@dataclass(frozen=True)
class Sum:
    """Two numbers and a sign between them."""

    left: int
    sign: str
    right: int

    @property
    def expression(self) -> str:
        return f"{self.left} {self.sign} {self.right}"

    @property
    def question(self) -> str:
        return f"What is {self.expression}?"

    @property
    def answer(self) -> int:
        return {"+": self.left + self.right, "-": self.left - self.right, "*": self.left * self.right}[self.sign]



def draw_sum(rng: random.Random) -> Sum:
    """Two numbers of two digits; the result is never negative, and mostly a product."""
    right, left = sorted(rng.randint(SMALLEST, LARGEST) for _ in range(2))
    return Sum(left, rng.choice("+-**"), right)


def sums(split: str, seed: int) -> Iterator[Sum]:
    """Different problems of one split ("train" or "test"). Raises ValueError once there are no more."""
    return distinct(split, seed, draw_sum, lambda problem: problem.expression)


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
    return text_of(answer.value)


def text_of(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"
