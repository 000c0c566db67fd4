"""Whether guesses of the next tokens pay, as measured, and how often they were right."""

import logging
from dataclasses import dataclass, field

from lowmem_grpo.engines.earlier import EarlierAnswers
from lowmem_grpo.engines.lookup import Chances, Guess

logger = logging.getLogger(__name__)

MOST = 8  # tokens that are guessed at once for a row
TRIED, PLAIN = 16, 8  # passes with guesses, and without, that are compared
HELD = 128  # passes until the next comparison; after each one that was lost twice as many
LONGEST = 16  # times as many, at most
GAIN = 1.03  # times as fast as without, from which on guesses are worth it


@dataclass
class Measured:
    """Passes of one kind."""

    passes: int = 0
    seconds: float = 0.0  # of each row
    tokens: int = 0
    rows: int = 0

    def note(self, rows: int, tokens: int, seconds: float) -> None:
        """A pass of so many rows drew so many tokens."""
        self.passes += 1
        self.rows += rows
        self.tokens += tokens
        self.seconds += rows * seconds

    @property
    def speed(self) -> float:
        """Tokens that a row gets in a second."""
        return self.tokens / max(self.seconds, 1e-9)


@dataclass
class Counted:
    """Of the passes since the last log."""

    passes: int = 0
    guessed: int = 0  # passes with guesses
    guesses: int = 0  # that were tried: a row's first wrong one ends its pass
    right: int = 0
    rows: int = 0  # of passes with guesses
    tokens: int = 0  # that they drew


@dataclass
class Speculation:
    """The switch of an engine. It compares some passes with guesses with some without, and holds what was faster for a
    while. It depends on the clock, and what is drawn does not depend on it."""

    guessing: bool = True
    left: int = TRIED  # passes until something else is tried
    comparing: bool = True
    losses: int = 0  # comparisons in a row that were lost
    with_guesses: Measured = field(default_factory=Measured)
    without: Measured = field(default_factory=Measured)
    counted: Counted = field(default_factory=Counted)
    chances: Chances = field(default_factory=Chances)
    earlier: EarlierAnswers = field(default_factory=EarlierAnswers)
    said: set[bool] = field(default_factory=set)

    def tried(self, guesses: list[Guess], drawn: list[int]) -> None:
        """What became of the guesses for a row: it drew these tokens, the first of them where its first guess is."""
        for guess, token in zip(guesses, drawn, strict=False):
            self.chances.note(guess, guess.token == token)
            self.counted.guesses += 1
            self.counted.right += guess.token == token

    def step(self, rows: int, tokens: int, seconds: float, guesses: bool) -> None:
        """A pass of so many rows has ended, with guesses for some of them or without any."""
        self.counted.passes += 1
        if guesses:
            self.counted.guessed += 1
            self.counted.rows += rows
            self.counted.tokens += tokens
        (self.with_guesses if self.guessing else self.without).note(rows, tokens, seconds)
        self.left -= 1
        if not self.left:
            self.turn()

    def turn(self) -> None:
        """Go from one kind of passes to the next: with guesses, without, and then the faster one for a while."""
        if not self.comparing:
            self.compare_again()
        elif self.guessing:
            self.guessing, self.left = False, PLAIN
        else:
            self.decide()

    def compare_again(self) -> None:
        """What is on may not be the faster kind any longer."""
        self.comparing, self.guessing, self.left = True, True, TRIED
        self.with_guesses, self.without = Measured(), Measured()
        self.chances.fade()

    def decide(self) -> None:
        """Hold what was faster."""
        gain = self.with_guesses.speed / max(self.without.speed, 1e-9)
        self.guessing, self.comparing = gain >= GAIN, False
        self.losses = 0 if self.guessing else self.losses + 1
        self.left = HELD * min(2 ** max(0, self.losses - 1), LONGEST)
        if self.guessing not in self.said:
            self.said.add(self.guessing)
            drawn = self.with_guesses.tokens / max(self.with_guesses.rows, 1)
            logger.info("speculation: with guesses a sequence of the tail draws %.2f tokens in a pass, and that is "
                        "%.2f times as fast as without: guesses are %s. This is measured again from time to time",
                        drawn, gain, "on" if self.guessing else "off")

    def metrics(self) -> dict[str, float]:
        """What was counted since the last call; empty where no sequences were left to guess for."""
        counted, self.counted = self.counted, Counted()
        if not counted.passes:
            return {}
        found = {"sampling/speculation/passes_share": counted.guessed / counted.passes}
        if counted.guesses:
            found["sampling/speculation/accepted"] = counted.right / counted.guesses
            found["sampling/speculation/tokens_per_pass"] = counted.tokens / counted.rows
        return found
