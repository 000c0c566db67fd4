"""Recipe `tictactoe`: win as X against opponents of mixed strength. The opponent is part of the environment.

    lowmem-grpo run tictactoe                       # the embedded model of the games, in minutes on two CPU cores
    lowmem-grpo run tictactoe strengths=1           # train against perfect play only
    lowmem-grpo run tictactoe test_strength=0.5     # measure against a stronger opponent
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from lowmem_grpo.recipes.eval_task import Exam, baselines, held_out_games, won
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.recipes.presets import USUAL, Preset, Presets, on_cards, prepare
from lowmem_grpo.trainer.play import Play
from lowmem_grpo.utils import SHARE, matching, require

DEFAULTS = USUAL | {
    "output_dir": "runs/tictactoe", "max_steps": 200, "learning_rate": 5e-6, "max_completion_length": 768,
    "max_turn_tokens": 48, "reward_weights": [0.0],
}
PRESETS: Presets = {
    "cpu": Preset("tiny-games", 320, 16, 32, {
        "max_steps": 120, "learning_rate": 1e-3, "max_completion_length": 256, "max_turn_tokens": 4,
        "per_device_train_batch_size": 128, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0,
    }),
} | on_cards(1280)
EMPTY = "123456789"  # a board: X, O, or the number of a free square
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
WIN, DRAW, LOSS, ILLEGAL = 1.0, 0.5, 0.0, -1.0  # what an episode earns
STRENGTHS = (0.0, 0.0, 0.5, 1.0)  # the seed chooses one of them


class TicTacToe:
    """An environment with an opponent. The seed decides the opponent's strength and its random choices."""

    opponent: Callable[[str], str] | None = None
    """Plays O instead: gets the board as text, and returns a free square; it is called again after any other reply."""

    def __init__(self, strengths: tuple[float, ...] = STRENGTHS) -> None:
        if not strengths or not all(0 <= strength <= 1 for strength in strengths):
            raise ValueError(f"strengths is {strengths}; give one number from 0 (random) to 1 (perfect), or more")
        self.strengths = strengths
        self.reset()

    def reset(self, seed: int = 0, strength: float | None = None, **row: object) -> str:
        """Empty the board; return the rules. A `strength` in the row replaces the one that the seed draws."""
        self.rng = random.Random(f"tictactoe-{seed}")
        drawn = self.rng.choice(self.strengths)
        self.strength = drawn if strength is None else strength
        self.board = EMPTY
        return f"You are X. Reply with the number of a free square.\n{shown(self.board)}"

    def step(self, reply: str) -> tuple[str, float, bool]:
        """Play the square that a reply names, then the opponent's move. A reply that names no free square loses."""
        move = square_in(reply)
        if move is None or move not in free(self.board):
            return f"illegal\n{shown(self.board)}", ILLEGAL, True
        self.board = played(self.board, move, "X")
        if not over(self.board):
            self.board = played(self.board, self.answer(), "O")
        paid = {"X": WIN, "O": LOSS, None: DRAW}[winner(self.board)] if over(self.board) else 0.0
        return shown(self.board), paid, over(self.board)

    def answer(self) -> int:
        """Return the opponent's move: from the function `opponent`, or if it is not set, random or perfect."""
        if self.opponent is None:
            strong = self.rng.random() < self.strength
            return self.rng.choice(best_moves(self.board, "O") if strong else free(self.board))
        told = f"You are O. Name a free square.\n{shown(self.board)}"
        while (move := square_in(self.opponent(told))) is None or move not in free(self.board):
            pass
        return move

    def state_key(self) -> str:
        return self.board

    @property
    def won(self) -> bool:
        return winner(self.board) == "X"


def shown(board: str) -> str:
    """Return the board as three lines of three squares, followed by a list of the free squares."""
    lines = ["|".join(board[start : start + 3]) for start in (0, 3, 6)]
    return "\n".join([*lines, f"Free: {' '.join(EMPTY[place] for place in free(board))}"])


def square_in(reply: str) -> int | None:
    """Return the square (0 to 8) that the only digit of a reply names; None if the reply names none or several."""
    digits = re.findall(r"[0-9]", reply)
    return EMPTY.index(digits[0]) if len(digits) == 1 and digits[0] in EMPTY else None


def free(board: str) -> list[int]:
    return [place for place, square in enumerate(board) if square not in "XO"]


def played(board: str, place: int, mark: str) -> str:
    return board[:place] + mark + board[place + 1 :]


def winner(board: str) -> str | None:
    return next((board[a] for a, b, c in LINES if board[a] == board[b] == board[c]), None)


def over(board: str) -> bool:
    return winner(board) is not None or not free(board)


@cache
def value(board: str, mark: str) -> int:
    """Return 1 if `mark`, whose turn it is, can force a win, 0 for a draw, -1 if it loses (minimax)."""
    if over(board):
        return 0 if winner(board) is None else -1  # whoever moved last has won
    return max(-value(played(board, place, mark), other(mark)) for place in free(board))


def best_moves(board: str, mark: str) -> list[int]:
    """Return all moves of a perfect player. A choice among them keeps a policy from memorizing whole games."""
    values = {place: -value(played(board, place, mark), other(mark)) for place in free(board)}
    return [place for place, worth in values.items() if worth == max(values.values())]


def other(mark: str) -> str:
    return "O" if mark == "X" else "X"


def random_move(game: TicTacToe, rng: random.Random) -> str:
    return EMPTY[rng.choice(free(game.board))]


def best_move(game: TicTacToe, rng: random.Random) -> str:
    return EMPTY[rng.choice(best_moves(game.board, "X"))]


PLAYERS = {"random": random_move, "perfect": best_move}


@dataclass
class TicTacToeOptions(RecipeOptions):
    strengths: str = "0,0,0.5,1"
    """The opponent's strengths in training, of which each game draws one. A strength is the probability of playing the
    best move: 0 is random play, 1 is perfect play."""
    test_strength: float = 0.0
    """The opponent's strength in evaluation."""
    eval_problems: int = 256
    """The number of held-out games in each evaluation."""

    RANGES = RecipeOptions.RANGES | {
        "test_strength": SHARE, "strengths": matching(
            "numbers from 0 (random) to 1 (perfect), with commas between them, such as 0,0.5,1",
            r"\s*(0|1|0?\.\d+|[01]\.0*)\s*(,\s*(0|1|0?\.\d+|[01]\.0*)\s*)*"),
    }

    def mixed(self) -> tuple[float, ...]:
        """Return the strengths as numbers. Raises ValueError if they are not numbers from 0 to 1."""
        require("strengths", self.strengths, self.RANGES["strengths"])
        return tuple(map(float, self.strengths.split(",")))


OPTIONS = TicTacToeOptions


EXAM = Exam(lambda size, seed, source: held_out_games(size, seed, strength=0.0), won, max_tokens=768,
            play=Play(TicTacToe), of_options=lambda options, tiny: {
                "problems": lambda size, seed, source: held_out_games(size, seed, strength=options.test_strength)})


def run(options: TicTacToeOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    test = held_out_games(options.eval_problems, setup.config.seed, strength=options.test_strength)
    known = baselines(TicTacToe(), PLAYERS, list(test))
    play = Play(partial(TicTacToe, options.mixed()))
    teach(setup, Lesson("tictactoe", None, [won], test, won, play=play, facts={"baselines": known}))
