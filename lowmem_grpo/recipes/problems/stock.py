"""Word problems with large numbers, for models that already solve small ones, generated with exact answers.

    A warehouse holds 340 boxes of tea. 12 carts of 36 boxes each arrive. A quarter of all boxes is sold. Then 57 boxes
    are found to be damaged and thrown away. How many boxes are left?
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from lowmem_grpo.recipes.problems.splits import distinct

GOODS = ("tea", "salt", "nails", "candles", "soap", "pencils", "rice", "buttons", "paint", "screws")
PARTS = {2: "Half", 3: "A third", 4: "A quarter", 5: "A fifth", 8: "An eighth"}
MIN_STEPS, MAX_STEPS = 4, 7
MIN_STOCK, MAX_STOCK = 50, 20_000  # boxes after each step


@dataclass(frozen=True)
class StockProblem:
    """A warehouse, what happens to its goods, and what is left."""

    question: str
    lines: tuple[str, ...]  # A line of worked solution for each step
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
    """A random problem whose stock stays between MIN_STOCK and MAX_STOCK."""
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
    while True:
        step = rng.choice(EVENTS)(rng, stock)
        if MIN_STOCK <= step[2] <= MAX_STOCK:
            return step


def stock_problems(split: str, seed: int) -> Iterator[StockProblem]:
    """Different problems of one split, without end."""
    return distinct(split, seed, draw_problem, lambda problem: problem.question)
