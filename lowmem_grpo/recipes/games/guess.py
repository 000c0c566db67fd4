"""Guess a hidden number in a few tries: after each guess the game says where the number can still be."""

import random
import re

LARGEST, TRIES = 32, 5
FOUND, WRONG, UNREADABLE = 1.0, 0.0, -1.0  # what an episode earns


class Guess:
    """An environment without data: the seed alone decides which number is hidden."""

    def __init__(self, largest: int = LARGEST, tries: int = TRIES) -> None:
        if largest < 2 or tries < 1:
            raise ValueError(f"largest is {largest} and tries is {tries}; they must be at least 2 and 1")
        self.largest, self.tries = largest, tries
        self.reset()

    def reset(self, seed: int = 0, **row: object) -> str:
        """Hide a number from 1 to `largest`; returns the rules."""
        self.hidden = random.Random(f"guess-{seed}").randint(1, self.largest)
        self.low, self.high = 1, self.largest  # where the number can still be, from what the policy was told
        self.left, self.won = self.tries, False
        return f"Guess my number from 1 to {self.largest} in {self.tries} tries. Reply with a number."

    def step(self, reply: str) -> tuple[str, float, bool]:
        """Compare the one number of a reply with the hidden one. A reply without a number, or with several, loses."""
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
        """Return all that a perfect player needs to know: where the number can be, and how many tries are left."""
        return f"{self.low}-{self.high} {self.left}"


def number_in(reply: str) -> int | None:
    """The whole number of a reply that has exactly one, of at most nine digits; else None."""
    numbers = re.findall(r"-?\d+", reply, re.ASCII)
    return int(numbers[0]) if len(numbers) == 1 and len(numbers[0]) < 10 else None


def blind(game: Guess, rng: random.Random) -> str:
    """A player that knows the range at the start and does not listen."""
    return str(rng.randint(1, game.largest))


def in_range(game: Guess, rng: random.Random) -> str:
    return str(rng.randint(game.low, game.high))


def bisect(game: Guess, rng: random.Random) -> str:
    """The perfect player: it halves what is possible."""
    return str((game.low + game.high) // 2)


PLAYERS = {"blind": blind, "in range": in_range, "bisection": bisect}
