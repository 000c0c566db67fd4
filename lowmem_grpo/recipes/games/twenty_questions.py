"""Find out what somebody thinks of by asking questions that are answered with yes or no.

The other side is the base model, which is told the thing and answers each question by itself.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from lowmem_grpo.environments.protocol import AskBase

FOUND, WRONG, UNREADABLE = 1.0, 0.0, -1.0  # what an episode earns
LARGEST = 16
NUMBERS = tuple(map(str, range(1, LARGEST + 1)))
THINGS = (  # about which a model from the hub knows by itself what is true
    "apple", "banana", "bear", "bee", "bell", "bicycle", "boat", "book", "bottle", "bread", "bridge", "bus", "cactus",
    "camera", "candle", "car", "castle", "cat", "chair", "cheese", "clock", "cloud", "coin", "cow", "desert", "diamond",
    "dog", "dolphin", "door", "drum", "eagle", "egg", "elephant", "fish", "flute", "forest", "fork", "frog", "giraffe",
    "glove", "guitar", "hammer", "hat", "horse", "house", "ice", "island", "kite", "knife", "ladder", "lamp", "lemon",
    "lion", "mirror", "moon", "mountain", "mouse", "newspaper", "octopus", "onion", "penguin", "pencil", "piano",
    "pillow", "plane", "potato", "rabbit", "radio", "river", "rocket", "rose", "sandwich", "scissors", "shark", "sheep",
    "ship", "shoe", "snail", "snake", "snow", "soap", "spider", "spoon", "star", "stone", "sun", "table", "telephone",
    "television", "tiger", "tomato", "train", "tree", "umbrella", "violin", "watch", "whale", "window", "wolf", "zebra",
)


@dataclass(frozen=True)
class Things:
    """The things that can be thought of, and the number of turns to find one."""

    things: tuple[str, ...]
    turns: int
    rules: str  # how the game begins, with the place {turns}

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"turns is {self.turns}; it must be at least 1")


WORLDS = {
    "numbers": Things(NUMBERS, 6, f"I think of a number from 1 to {LARGEST}. You have {{turns}} turns: "
                                 'ask "Is it above N?", or reply "Guess: N".'),
    "things": Things(THINGS, 20, "I think of a thing. You have {turns} turns: "
                                'ask a question that yes or no can answer, or reply "Guess: NAME".'),
}


class TwentyQuestions:
    """An environment whose other side is the base model. Its seed decides what that thinks of.

    `opponent`, where it is set, takes the other side instead: it gets what the base model would get, and replies.
    """

    opponent: Callable[[str], str] | None = None

    def __init__(self, world: Things = WORLDS["numbers"]) -> None:
        self.world = world
        self.reset()

    def reset(self, seed: int = 0, world: str | None = None, **row: object) -> str:
        """Think of a thing; returns the rules. A `world` in the row replaces the one of the class."""
        if world is not None:
            self.world = WORLDS[world]
        self.thing = random.Random(f"twenty-questions-{seed}").choice(self.world.things)
        self.left, self.won = self.world.turns, False
        self.low, self.high = 1, len(self.world.things)  # where a number can still be, by the answers
        return self.world.rules.format(turns=self.left)

    def step(self, reply: str) -> AskBase | tuple[str, float, bool]:
        """A guess ends the game. A question goes to the other side; the last turn has to be a guess."""
        guess = guess_in(reply)
        self.left -= 1
        if guess is not None:
            self.won = guess == self.thing
            return f"It is {self.thing}.", FOUND if self.won else WRONG, True
        if not reply.strip().endswith("?"):
            return "That is neither a question nor a guess.", UNREADABLE, True
        if not self.left:
            return f"It is {self.thing}.", WRONG, True
        asked = about(self.thing, reply.strip())
        if self.opponent is not None:
            return self.pass_answer(reply, self.opponent(asked))
        return AskBase(asked, lambda said: self.pass_answer(reply, said), lambda said: yes_or_no(said) is not None, 8)

    def pass_answer(self, question: str, said: str) -> tuple[str, float, bool]:
        """Tell the policy yes, no, or that it is not known, and of numbers which ones are left."""
        answer = yes_or_no(said) or "I do not know"
        if self.world.things != NUMBERS:
            return f"{answer}, {self.left} left", 0.0, False
        self.low, self.high = narrowed(self.low, self.high, question, answer)
        return f"{answer}: {self.low} to {self.high}, {self.left} left", 0.0, False


def about(thing: str, question: str) -> str:
    return f"You think of: {thing}. Answer with yes or no.\n{question}"


def guess_in(reply: str) -> str | None:
    """The name behind `Guess:`, without an article; None where nothing is guessed."""
    match = re.search(r"\bguess:\s*(.+)", reply, re.IGNORECASE)
    return None if match is None else re.sub(r"^(?:an?|the) ", "", match[1].strip(" .!*\"'").lower())


def yes_or_no(reply: str) -> str | None:
    """Return which of the two words a reply has; None if it has none or both."""
    words = {word for word in re.findall(r"[a-z]+", reply.lower()) if word in ("yes", "no")}
    return words.pop() if len(words) == 1 else None


def limit_in(question: str) -> int | None:
    """The number that a question of this form names: `Is it above N?`"""
    match = re.fullmatch(r"is it above ([0-9]{1,9})\s?\?", question.strip(), re.IGNORECASE)
    return None if match is None else int(match[1])


def narrowed(low: int, high: int, question: str, answer: str) -> tuple[int, int]:
    """Return the range of a number after an answer; nothing changes where that contradicts what was known."""
    limit = limit_in(question)
    if limit is None or answer not in ("yes", "no"):
        return low, high
    new = (max(low, limit + 1), high) if answer == "yes" else (low, min(high, limit))
    return new if new[0] <= new[1] else (low, high)


def question_of(limit: int) -> str:
    return f"Is it above {limit}?"


def truth(number: str, question: str) -> str:
    """The right answer about a number; ValueError for a question of another form."""
    limit = limit_in(question)
    if limit is None:
        raise ValueError(f"{question!r} is not of the form 'Is it above N?'")
    return "yes" if int(number) > limit else "no"


def truthful(told: str) -> str:
    first, question = told.split("\n")
    return truth(first.removeprefix("You think of: ").split(".")[0], question)


def blind(game: TwentyQuestions, rng: random.Random) -> str:
    """A player that knows the range at the start and does not listen; it guesses in the last turn."""
    return question_of(rng.randint(1, LARGEST - 1)) if game.left > 1 else f"Guess: {rng.randint(1, LARGEST)}"


def listening(game: TwentyQuestions, rng: random.Random) -> str:
    """A player that asks anything that is still open, and guesses what is left."""
    if game.left == 1 or game.low == game.high:
        return f"Guess: {rng.randint(game.low, game.high)}"
    return question_of(rng.randint(game.low, game.high - 1))


def halving(game: TwentyQuestions, rng: random.Random) -> str:
    """The perfect player: its questions halve what is left."""
    if game.left == 1 or game.low == game.high:
        return f"Guess: {rng.randint(game.low, game.high)}"
    return question_of((game.low + game.high) // 2)


PLAYERS = {"blind": blind, "listening": listening, "halving": halving}


def answered_truly(world: Things = WORLDS["numbers"]) -> TwentyQuestions:
    """The game of numbers with an opponent who is always right, for scripted players."""
    game = TwentyQuestions(world)
    game.opponent = truthful
    return game
