"""Recipe `guess`: find a hidden number from the hints "higher" and "lower". No data: a seed makes each game.

    lowmem-grpo run guess                           # the embedded model of the games, in minutes on two CPU cores
    lowmem-grpo run guess largest=64 tries=6        # harder
    lowmem-grpo run guess turn_discount=1           # an advantage for each turn (default on a CPU)
"""

import random
import re
from dataclasses import dataclass
from functools import partial

from lowmem_grpo.recipes.eval_task import Exam, baselines, held_out_games, won
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.recipes.presets import USUAL, Preset, Presets, on_cards, prepare
from lowmem_grpo.trainer.play import Play
from lowmem_grpo.utils import at_least

DEFAULTS = USUAL | {
    "output_dir": "runs/guess", "max_steps": 100, "learning_rate": 5e-6, "max_completion_length": 512,
    "max_turn_tokens": 48, "reward_weights": [0.0],
}
PRESETS: Presets = {
    "cpu": Preset("tiny-games", 256, 16, 32, {
        "max_steps": 64, "learning_rate": 3.5e-3, "max_completion_length": 160, "max_turn_tokens": 4,
        "per_device_train_batch_size": 96, "gradient_accumulation_steps": 4, "turn_discount": 1.0, "max_grad_norm": 1.0,
        "save_steps": 16,
    }),
} | on_cards(1024)
LARGEST, TRIES = 32, 5
FOUND, WRONG, UNREADABLE = 1.0, 0.0, -1.0  # what an episode earns


class Guess:
    """An environment without data: the seed determines the hidden number."""

    def __init__(self, largest: int = LARGEST, tries: int = TRIES) -> None:
        if largest < 2 or tries < 1:
            raise ValueError(f"largest is {largest} and tries is {tries}; they must be at least 2 and 1")
        self.largest, self.tries = largest, tries
        self.reset()

    def reset(self, seed: int = 0, **row: object) -> str:
        """Hide a number from 1 to `largest`; return the rules."""
        self.hidden = random.Random(f"guess-{seed}").randint(1, self.largest)
        self.low, self.high = 1, self.largest  # the remaining range, as the game has told it
        self.left, self.won = self.tries, False
        return f"Guess my number from 1 to {self.largest} in {self.tries} tries. Reply with a number."

    def step(self, reply: str) -> tuple[str, float, bool]:
        """Compare the number in a reply with the hidden one. A reply without a number, or with several, loses."""
        guess = number_in(reply)
        if guess is None:
            return "unreadable", UNREADABLE, True
        self.left -= 1
        self.won = guess == self.hidden
        if self.won:
            return "found", FOUND, True
        if guess < self.hidden:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        said = "higher" if guess < self.hidden else "lower"
        return f"{said}: {self.low} to {self.high}", WRONG, self.left == 0

    def state_key(self) -> str:
        """Return all that a perfect player needs to know: the remaining range, and the number of tries left."""
        return f"{self.low}-{self.high} {self.left}"


def number_in(reply: str) -> int | None:
    """Return the integer in a reply that has exactly one, of at most nine digits; else None."""
    numbers = re.findall(r"-?\d+", reply, re.ASCII)
    return int(numbers[0]) if len(numbers) == 1 and len(numbers[0]) < 10 else None


def blind(game: Guess, rng: random.Random) -> str:
    """Guess in the initial range, ignoring the answers."""
    return str(rng.randint(1, game.largest))


def in_range(game: Guess, rng: random.Random) -> str:
    return str(rng.randint(game.low, game.high))


def bisect(game: Guess, rng: random.Random) -> str:
    return str((game.low + game.high) // 2)


PLAYERS = {"blind": blind, "in range": in_range, "bisection": bisect}


@dataclass
class GuessOptions(RecipeOptions):
    largest: int = 32
    """The game hides a number from 1 to `largest`."""
    tries: int = 5
    """The most guesses in a game. Bisection always wins if `largest` is below 2^tries."""
    eval_problems: int = 256
    """The number of held-out games in each evaluation."""

    RANGES = RecipeOptions.RANGES | {"largest": at_least(2), "tries": at_least(1)}


OPTIONS = GuessOptions


EXAM = Exam(lambda size, seed, source: held_out_games(size, seed), won, max_tokens=512, play=Play(Guess),
            of_options=lambda options, tiny: {"play": Play(partial(Guess, options.largest, options.tries))})


def run(options: GuessOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    game = partial(Guess, options.largest, options.tries)
    test = held_out_games(options.eval_problems, setup.config.seed)
    known = baselines(game(), PLAYERS, list(test))
    teach(setup, Lesson("guess", None, [won], test, won, play=Play(game), facts={"baselines": known}))
