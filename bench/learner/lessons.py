"""What the learner of bench/learner/bench.py is taught before GRPO: arithmetic and countdown, with planted mistakes."""

import random
from collections.abc import Iterator

from bench.learner.sizes import PUZZLES
from bench.tiny_models.tiny_model import ERROR_RATE, demonstration
from lowmem_grpo.recipes.problems.arithmetic import Problem, problems
from lowmem_grpo.recipes.problems.countdown import Countdown, Difficulty, Step, combine, draws

TRIES = 6  # wrong attempts; the one nearest to the target becomes the planted mistake
TEXTS = 4000  # that the tokenizer is trained on


def answer_of(problem: Problem | Countdown, rng: random.Random) -> str:
    """A worked answer. ERROR_RATE is how often a step of arithmetic, or a whole puzzle, is wrong."""
    if isinstance(problem, Problem):
        return demonstration(problem, rng)
    steps, expression = problem.steps, problem.solution
    if rng.random() < ERROR_RATE:
        steps, expression = mistaken(problem, rng)
    return "\n".join([*map(str, steps), f"Answer: {expression}"])


def mistaken(puzzle: Countdown, rng: random.Random) -> tuple[tuple[Step, ...], str]:
    """Steps that miss the target, the last of which claims to reach it, and their expression."""
    made = [combine(rng, puzzle.numbers, puzzle.operators) for _ in range(TRIES)]
    wrong = [ways for ways in made if ways is not None and ways[0].value != puzzle.target]
    if not wrong:
        return puzzle.steps, puzzle.solution
    end, steps = min(wrong, key=lambda ways: abs(ways[0].value - puzzle.target))
    last = steps[-1]
    return (*steps[:-1], Step(last.left, last.sign, last.right, puzzle.target)), end.text


def lessons(seed: str) -> Iterator[Problem | Countdown]:
    """Endless training problems, arithmetic and countdown in turn."""
    sums, puzzles = problems("train", seed), draws("train", random.Random(f"puzzles-{seed}"), Difficulty(**PUZZLES))
    while True:
        yield next(sums)
        yield next(puzzles)


def sample_texts(seed: int) -> list[str]:
    """Texts that the tokenizer is trained on."""
    rng, source = random.Random(seed), lessons(f"texts-{seed}")
    return [f"{problem.question}\n{answer_of(problem, rng)}\nuser\nassistant\nsystem\n"
            for problem, _ in zip(source, range(TEXTS), strict=False)]
