"""Guesses of the next tokens of an answer, looked up where the same tokens came before: in the prompt, in the other
answers of its group, and in earlier ones. No model is asked."""

from collections.abc import Sequence
from dataclasses import dataclass, field

LENGTHS = (8, 4, 2)  # of the ends of a text that are looked up, the longest first
LIKELY = 0.3  # guesses go on while their chance, as counted, is at least so much
UNTRIED = {8: 0.9, 4: 0.7, 2: 0.5}  # the chance of a guess by the end's length, before any was tried


@dataclass(frozen=True)
class Guess:
    """A token that may come next, and the length of the known end that it followed."""

    token: int
    length: int


@dataclass
class Chances:
    """How often guesses were right, by the length of the end that they followed."""

    right: dict[int, float] = field(default_factory=lambda: {length: 4 * chance for length, chance in UNTRIED.items()})
    tried: dict[int, float] = field(default_factory=lambda: dict.fromkeys(LENGTHS, 4.0))

    def note(self, guess: Guess, right: bool) -> None:
        """A guess was tried."""
        self.tried[guess.length] += 1
        self.right[guess.length] += right

    def of(self, length: int) -> float:
        """The share that was right."""
        return self.right[length] / self.tried[length]

    def fade(self) -> None:
        """Give what is known less weight, as the policy has changed since."""
        for length, chance in UNTRIED.items():
            self.right[length] = (self.right[length] + 4 * chance) / 2
            self.tried[length] = (self.tried[length] + 4) / 2


class Lookup:
    """For each end of a text, which tokens followed it how often. An end is held as its hash: two that share one would
    lead to a wrong guess, and to nothing else."""

    def __init__(self) -> None:
        self.after: dict[int, int | dict[int, int]] = {}  # a token that followed once, or how often each one did

    def add(self, ids: Sequence[int], start: int = 0) -> None:
        """Count the tokens of a text from `start` on."""
        for place in range(max(start, LENGTHS[-1]), len(ids)):
            for length in LENGTHS:
                if length <= place:
                    self.count(hash(tuple(ids[place - length : place])), ids[place])

    def count(self, key: int, token: int) -> None:
        """A token followed the end with this hash."""
        known = self.after.get(key)
        if known is None:
            self.after[key] = token
            return
        counts = {known: 1} if isinstance(known, int) else known
        counts[token] = counts.get(token, 0) + 1
        self.after[key] = counts

    def guess(self, ids: Sequence[int], most: int, chances: Chances) -> list[Guess]:
        """At most so many tokens that may follow a text, as long as their chance together is high enough."""
        end, found, together = list(ids[-LENGTHS[0] :]), list[Guess](), 1.0
        while len(found) < most:
            guess, share = self.next(end)
            together *= share * chances.of(guess.length)
            if together < LIKELY:
                break
            found.append(guess)
            end = [*end[1 - LENGTHS[0] :], guess.token]
        return found

    def next(self, end: list[int]) -> tuple[Guess, float]:
        """The token that followed the longest known end most often, the first of equals, and its share of all that
        followed; a share of 0 where none is known."""
        for length in LENGTHS:
            known = self.after.get(hash(tuple(end[-length:]))) if length <= len(end) else None
            if isinstance(known, int):
                return Guess(known, length), 1.0
            if known is not None:
                token = max(known, key=known.__getitem__)
                return Guess(token, length), known[token] / sum(known.values())
        return Guess(0, LENGTHS[-1]), 0.0
