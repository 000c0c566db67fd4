"""Find out what somebody thinks of by asking questions that are answered with yes or no.

The other side is the base model, which is told the thing and answers each question by itself.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from lowmem_grpo.environments.observations import AskBase

FOUND, WRONG, UNREADABLE = 1.0, 0.0, -1.0  # what an episode earns
PROPERTIES = ("alive", "big", "fast", "soft", "loud", "wet")
TABLE = {  # of the small world: what is true of each thing, in the order of PROPERTIES
    "cat": "101100", "dog": "101110", "whale": "110011", "shark": "111001", "fish": "101001", "frog": "100111",
    "snail": "100101", "lion": "111110", "horse": "111000", "bear": "110110", "sheep": "100110", "tree": "110000",
    "rose": "100100", "bee": "101010", "cactus": "100000", "train": "011010", "cloud": "010101", "house": "010000",
    "bed": "010100", "river": "011001", "bell": "000010", "stone": "000000", "pillow": "000100", "ice": "000001",
}
THINGS = (  # of the large world, about which a model from the hub knows by itself what is true
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
class World:
    """What can be thought of, and in how many turns it has to be found."""

    things: tuple[str, ...]
    turns: int
    known: bool = False  # whether TABLE says all that can be asked, so that scripted players can play

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"turns is {self.turns}; it must be at least 1")


WORLDS = {"small": World(tuple(TABLE), 6, known=True), "large": World(THINGS, 20)}


class TwentyQuestions:
    """An environment whose other side is the base model. Its seed decides what that thinks of.

    `opponent`, where it is set, takes the other side instead: it gets what the base model would get, and replies.
    """

    opponent: Callable[[str], str] | None = None

    def __init__(self, world: World = WORLDS["small"]) -> None:
        self.world = world
        self.reset()

    def reset(self, seed: int = 0, world: str | None = None, **row: object) -> str:
        """Think of a thing; returns the rules. A `world` in the row replaces the one of the class."""
        if world is not None:
            self.world = WORLDS[world]
        self.thing = random.Random(f"twenty-questions-{seed}").choice(self.world.things)
        self.left, self.won = self.world.turns, False
        self.known: list[tuple[str, str]] = []  # questions and their answers
        return (f"I think of a thing. You have {self.left} turns: ask a question that yes or no can answer, or reply "
                "Guess: NAME.")

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
            return self.told(reply, self.opponent(asked))
        return AskBase(asked, lambda said: self.told(reply, said), lambda said: yes_or_no(said) is not None, 8)

    def told(self, question: str, said: str) -> tuple[str, float, bool]:
        """The policy hears no more than yes, no, or that this is not known: the other side cannot name the thing."""
        answer = yes_or_no(said) or "I do not know"
        self.known.append((question, answer))
        return f"{answer}, {self.left} left", 0.0, False


def about(thing: str, question: str) -> str:
    """What the other side is asked."""
    return f"You think of: {thing}. Answer with yes or no.\n{question}"


def guess_in(reply: str) -> str | None:
    """The name behind `Guess:`, without an article; None where nothing is guessed."""
    found = re.search(r"\bguess:\s*(.+)", reply, re.IGNORECASE)
    return None if found is None else re.sub(r"^(?:an?|the) ", "", found[1].strip(" .!*\"'").lower())


def yes_or_no(reply: str) -> str | None:
    """What a reply says that has one of the two words; else None."""
    found = {word for word in re.findall(r"[a-z]+", reply.lower()) if word in ("yes", "no")}
    return found.pop() if len(found) == 1 else None


# A world that is known by heart, and players who know it


def question_of(name: str) -> str:
    return f"Is it {name}?"


def truth(thing: str, question: str) -> str:
    """The right answer of the small world; ValueError for a question that is not about a property."""
    asked = [at for at, name in enumerate(PROPERTIES) if question == question_of(name)]
    if len(asked) != 1:
        raise ValueError(f"{question!r} is not about one of {', '.join(PROPERTIES)}")
    return "yes" if TABLE[thing][asked[0]] == "1" else "no"


def truthful(told: str) -> str:
    """An opponent who is always right in the small world."""
    first, question = told.split("\n")
    return truth(first.removeprefix("You think of: ").split(".")[0], question)


def left_over(game: TwentyQuestions) -> list[str]:
    """The things of the small world that fit all answers."""
    return [thing for thing in game.world.things if all(truth(thing, asked) == said for asked, said in game.known)]


def asks_anything(game: TwentyQuestions, rng: random.Random) -> str:
    """A player that asks at random, also what it knows, and guesses in the last turn what fits the answers."""
    return question_of(rng.choice(PROPERTIES)) if game.left > 1 else f"Guess: {rng.choice(left_over(game))}"


def blind(game: TwentyQuestions, rng: random.Random) -> str:
    """The same, but it guesses without having listened."""
    return question_of(rng.choice(PROPERTIES)) if game.left > 1 else f"Guess: {rng.choice(game.world.things)}"


def halving(game: TwentyQuestions, rng: random.Random) -> str:
    """A player whose question divides what is possible as evenly as it can."""
    possible = left_over(game)
    if game.left == 1 or len(possible) == 1:
        return f"Guess: {rng.choice(possible)}"
    yes = {name: sum(truth(thing, question_of(name)) == "yes" for thing in possible) for name in PROPERTIES}
    return question_of(min(PROPERTIES, key=lambda name: abs(2 * yes[name] - len(possible))))


PLAYERS = {"blind": blind, "asks anything": asks_anything, "halving": halving}


def answered_truly(world: World = WORLDS["small"]) -> TwentyQuestions:
    """The game with an opponent who is always right, for scripted players who know the small world."""
    game = TwentyQuestions(world)
    game.opponent = truthful
    return game
