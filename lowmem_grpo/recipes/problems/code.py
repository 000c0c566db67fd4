"""Small Python functions to write, generated with tests.

    Write a Python function `solve(numbers)` that returns how many of the numbers are above 12 and divisible by 3.
    For example, solve([15, 3, 18]) gives 2. Reply with the function in one ```python block.

A problem is a template and two parameters. The example in the question is one of the tests; the others are hidden.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.recipes.problems.splits import distinct

HIDDEN_TESTS = 4
WORDS = ("ant", "bear", "crane", "dingo", "eel", "falcon", "goose", "heron", "ibex", "jackdaw", "kiwi", "lark")
QUESTION = ("Write a Python function `solve({argument})` that returns {wanted}. For example, solve({given!r}) gives "
            "{result!r}. Reply with the function in one ```python block.")


def draw_integer(rng: random.Random) -> int:
    return rng.randint(0, 99)


def draw_numbers(rng: random.Random) -> list[int]:
    return [rng.randint(0, 99) for _ in range(rng.randint(0, 6))]


def draw_text(rng: random.Random) -> str:
    return " ".join(rng.sample(WORDS, rng.randint(1, 3)))


def draw_words(rng: random.Random) -> list[str]:
    return rng.sample(WORDS, rng.randint(0, 5))


@dataclass(frozen=True)
class Snippet:
    """The result of `solve(argument)`: in words, as a Python expression, and as a function of (argument, a, b)."""

    argument: str
    wanted: str
    expression: str
    rule: Callable[[Any, int, int], Any]
    draw: Callable[[random.Random], Any]
    a: tuple[int, int]
    b: tuple[int, int]


TEMPLATES = (
    Snippet("x", "{a} times x plus {b}", "{a} * x + {b}", lambda x, a, b: a * x + b, draw_integer, (2, 20), (1, 50)),
    Snippet("x", "the remainder of {a} times x divided by {b}", "{a} * x % {b}", lambda x, a, b: a * x % b,
            draw_integer, (2, 20), (5, 50)),
    Snippet("x", "x minus {a} where x is above {b}, and x plus {a} where it is not", "x - {a} if x > {b} else x + {a}",
            lambda x, a, b: x - a if x > b else x + a, draw_integer, (1, 20), (20, 80)),
    Snippet("numbers", "how many of the numbers are above {a} and divisible by {b}",
            "sum(n > {a} and n % {b} == 0 for n in numbers)",
            lambda numbers, a, b: sum(n > a and n % b == 0 for n in numbers), draw_numbers, (5, 60), (2, 5)),
    Snippet("numbers", "the sum of the numbers, each multiplied by {a} but never counted as more than {b}",
            "sum(min({a} * n, {b}) for n in numbers)",
            lambda numbers, a, b: sum(min(a * n, b) for n in numbers), draw_numbers, (2, 9), (20, 90)),
    Snippet("numbers", "a list of the numbers above {b} in reverse order, {a} added to each",
            "[n + {a} for n in reversed(numbers) if n > {b}]",
            lambda numbers, a, b: [n + a for n in reversed(numbers) if n > b], draw_numbers, (1, 20), (20, 60)),
    Snippet("text", "the text without its first {a} characters, in upper case, repeated {b} times",
            "text[{a}:].upper() * {b}", lambda text, a, b: text[a:].upper() * b, draw_text, (1, 6), (2, 5)),
    Snippet("words", "the words of more than {a} letters as one text, with {b} dashes between them",
            '("-" * {b}).join(word for word in words if len(word) > {a})',
            lambda words, a, b: ("-" * b).join(word for word in words if len(word) > a), draw_words, (3, 5), (1, 9)),
)


@dataclass(frozen=True)
class CodeProblem:
    """A template's number and its two parameters."""

    template: int
    a: int
    b: int

    @property
    def key(self) -> str:
        return f"{self.template} {self.a} {self.b}"

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """Arguments and results of `solve`, first those of the example in the question. The same at every call."""
        form, rng = TEMPLATES[self.template], random.Random(self.key)
        drawn = {repr(argument): argument for argument in (form.draw(rng) for _ in range(20 * HIDDEN_TESTS))}
        chosen = list(drawn.values())[: 1 + HIDDEN_TESTS]
        return [(argument, form.rule(argument, self.a, self.b)) for argument in chosen]

    @property
    def question(self) -> str:
        form, (argument, result) = TEMPLATES[self.template], self.pairs[0]
        wanted = form.wanted.format(a=self.a, b=self.b)
        return QUESTION.format(argument=form.argument, wanted=wanted, given=argument, result=result)

    @property
    def tests(self) -> list[str]:
        return [f"assert solve({argument!r}) == {result!r}" for argument, result in self.pairs]

    @property
    def solution(self) -> str:
        """A function that passes."""
        form = TEMPLATES[self.template]
        return f"def solve({form.argument}):\n    return {form.expression.format(a=self.a, b=self.b)}\n"


def draw_problem(rng: random.Random) -> CodeProblem:
    number = rng.randrange(len(TEMPLATES))
    return CodeProblem(number, rng.randint(*TEMPLATES[number].a), rng.randint(*TEMPLATES[number].b))


def code_problems(split: str, seed: int) -> Iterator[CodeProblem]:
    """Different problems of one split. Raises ValueError where there are no more: there are some thousands."""
    return distinct(split, seed, draw_problem, lambda problem: problem.key)
