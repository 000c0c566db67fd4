"""Recipe `twenty_questions`: ask questions to find a secret. The base model answers, and is not trained.

    lowmem-grpo run twenty_questions                # the embedded model, in minutes on two CPU cores
    lowmem-grpo run twenty_questions turns=5        # one turn less
    lowmem-grpo run twenty_questions gpu=24         # 100 things, and a model from the hub
    lowmem-grpo generate --recipe twenty_questions --you against   # the model asks, you answer
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from lowmem_grpo.environments.protocol import AskBase
from lowmem_grpo.recipes.eval_task import Exam, baselines, held_out_games, won
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.recipes.presets import USUAL, Preset, Presets, on_cards, prepare
from lowmem_grpo.trainer.play import Play
from lowmem_grpo.utils import at_least, one_of

DEFAULTS = USUAL | {
    "output_dir": "runs/twenty_questions", "max_steps": 200, "learning_rate": 5e-6, "max_completion_length": 1536,
    "max_turn_tokens": 48, "reward_weights": [0.0], "turn_discount": 1.0,
}
PRESETS: Presets = {
    "cpu": Preset("tiny-talks", 256, 16, 32, {
        "max_steps": 64, "learning_rate": 3e-3, "max_completion_length": 160, "max_turn_tokens": 8,
        "per_device_train_batch_size": 128, "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0, "save_steps": 16,
    }),
} | on_cards(2048)
FOUND, WRONG, UNREADABLE = 1.0, 0.0, -1.0  # what an episode earns
LARGEST = 16
NUMBERS = tuple(map(str, range(1, LARGEST + 1)))
THINGS = (  # about which a model from the hub can answer questions
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
    """The possible things, and the number of turns to find one."""

    things: tuple[str, ...]
    turns: int
    rules: str  # the first message, with the placeholder {turns}

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
    """An environment in which the base model is told a secret thing, and answers each question without seeing the other
    questions. The seed chooses the thing. If `opponent` is set, it answers instead of the base model."""

    opponent: Callable[[str], str] | None = None

    def __init__(self, world: Things = WORLDS["numbers"]) -> None:
        self.world = world
        self.reset()

    def reset(self, seed: int = 0, world: str | None = None, **row: object) -> str:
        """Choose a thing; return the rules. If a row has a `world`, "numbers" or "things", the thing comes from it."""
        if world is not None:
            self.world = WORLDS[world]
        self.thing = random.Random(f"twenty-questions-{seed}").choice(self.world.things)
        self.left, self.won = self.world.turns, False
        self.low, self.high = 1, len(self.world.things)  # the range that the answers leave for a number
        return self.world.rules.format(turns=self.left)

    def step(self, reply: str) -> AskBase | tuple[str, float, bool]:
        """End the game at a guess; pass a question to the base model or `opponent`. The last turn must be a guess."""
        match = re.search(r"\bguess:\s*(.+)", reply, re.IGNORECASE)
        # in lower case, without an article
        guess = None if match is None else re.sub(r"^(?:an?|the) ", "", match[1].strip(" .!*\"'").lower())
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
        """Tell the policy "yes", "no" or "I do not know", and for numbers the remaining range."""
        answer = yes_or_no(said) or "I do not know"
        if self.world.things != NUMBERS:
            return f"{answer}, {self.left} left", 0.0, False
        self.low, self.high = narrowed(self.low, self.high, question, answer)
        return f"{answer}: {self.low} to {self.high}, {self.left} left", 0.0, False


def about(thing: str, question: str) -> str:
    return f"You think of: {thing}. Answer with yes or no.\n{question}"


def yes_or_no(reply: str) -> str | None:
    """Return "yes" or "no" if a reply has exactly one of these words, else None."""
    words = {word for word in re.findall(r"[a-z]+", reply.lower()) if word in ("yes", "no")}
    return words.pop() if len(words) == 1 else None


def limit_in(question: str) -> int | None:
    """Return N of a question of the form `Is it above N?`, else None."""
    match = re.fullmatch(r"is it above ([0-9]{1,9})\s?\?", question.strip(), re.IGNORECASE)
    return None if match is None else int(match[1])


def narrowed(low: int, high: int, question: str, answer: str) -> tuple[int, int]:
    """Return the range of a number after an answer; an answer that contradicts the range does not change it."""
    limit = limit_in(question)
    if limit is None or answer not in ("yes", "no"):
        return low, high
    new = (max(low, limit + 1), high) if answer == "yes" else (low, min(high, limit))
    return new if new[0] <= new[1] else (low, high)


def question_of(limit: int) -> str:
    return f"Is it above {limit}?"


def truth(number: str, question: str) -> str:
    """Return the right answer about a number; ValueError for a question that is not `Is it above N?`."""
    limit = limit_in(question)
    if limit is None:
        raise ValueError(f"{question!r} is not of the form 'Is it above N?'")
    return "yes" if int(number) > limit else "no"


def truthful(told: str) -> str:
    """Return the true answer to a prompt with a number and a question about it."""
    first, question = told.split("\n")
    return truth(first.removeprefix("You think of: ").split(".")[0], question)


def blind(game: TwentyQuestions, rng: random.Random) -> str:
    """Ask about numbers of the initial range, ignoring the answers; guess in the last turn."""
    return question_of(rng.randint(1, LARGEST - 1)) if game.left > 1 else f"Guess: {rng.randint(1, LARGEST)}"


def listening(game: TwentyQuestions, rng: random.Random) -> str:
    """Ask a random question within the remaining range; guess in the last turn, or when one number is left."""
    if game.left == 1 or game.low == game.high:
        return f"Guess: {rng.randint(game.low, game.high)}"
    return question_of(rng.randint(game.low, game.high - 1))


def halving(game: TwentyQuestions, rng: random.Random) -> str:
    if game.left == 1 or game.low == game.high:
        return f"Guess: {rng.randint(game.low, game.high)}"
    return question_of((game.low + game.high) // 2)


PLAYERS = {"blind": blind, "listening": listening, "halving": halving}


def answered_truly(world: Things = WORLDS["numbers"]) -> TwentyQuestions:
    """Return the game of numbers with an opponent that is always right, for scripted players."""
    game = TwentyQuestions(world)
    game.opponent = truthful
    return game


OF_TINY, OF_OTHERS = WORLDS


@dataclass
class TwentyQuestionsOptions(RecipeOptions):
    world: str | None = None
    """The possible secrets: "numbers" (1 to 16) or "things" (100 things). None: numbers for an embedded model, things
    for a hub model."""
    turns: int | None = None
    """The most turns in a game; each turn is a question or a guess. None: 6 for numbers, 20 for things."""
    eval_problems: int = 256
    """The number of held-out games in each evaluation."""

    RANGES = RecipeOptions.RANGES | {"world": one_of("numbers", "things"), "turns": at_least(1)}

    def chosen(self, tiny: bool) -> Things:
        """Return things, turns and rules for an embedded (`tiny`) or another model."""
        name = (OF_TINY if tiny else OF_OTHERS) if self.world is None else self.world
        usual = WORLDS[name]
        return replace(usual, turns=usual.turns if self.turns is None else self.turns)


OPTIONS = TwentyQuestionsOptions


EXAM = Exam(lambda size, seed, source: held_out_games(size, seed, world=OF_OTHERS), won, max_tokens=1536,
            play=Play(TwentyQuestions), of_tiny=lambda size, seed, source: held_out_games(size, seed, world=OF_TINY),
            tiny_max_tokens=160, of_options=lambda options, tiny: {
                "problems": lambda size, seed, source: held_out_games(size, seed),
                "play": Play(partial(TwentyQuestions, options.chosen(tiny)))})


def run(options: TwentyQuestionsOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    world = options.chosen(setup.is_tiny)
    test = held_out_games(options.eval_problems, setup.config.seed)
    known = baselines(answered_truly(world), PLAYERS, list(test)) if world.things == NUMBERS else {}
    play = Play(partial(TwentyQuestions, world))
    teach(setup, Lesson("twenty_questions", None, [won], test, won, play=play, facts={"baselines": known}))
