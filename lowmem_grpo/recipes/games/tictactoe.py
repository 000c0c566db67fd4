"""Tic-tac-toe as X against an opponent that plays its best move now and then, and a random one otherwise."""

import random
import re
from collections.abc import Callable
from functools import cache

EMPTY = "123456789"  # a board: X, O, or the number of a free square
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
WIN, DRAW, LOSS, ILLEGAL = 1.0, 0.5, 0.0, -1.0  # what an episode earns
STRENGTHS = (0.0, 0.0, 0.5, 1.0)  # the seed chooses one of them


class TicTacToe:
    """An environment with an opponent. Its seed decides how strong the opponent is, and what it draws."""

    opponent: Callable[[str], str] | None = None
    """Who plays O instead: somebody who sees the board, and names a free square (asked again for anything else)."""

    def __init__(self, strengths: tuple[float, ...] = STRENGTHS) -> None:
        if not strengths or not all(0 <= strength <= 1 for strength in strengths):
            raise ValueError(f"strengths is {strengths}; give one number from 0 (random) to 1 (perfect), or more")
        self.strengths = strengths
        self.reset()

    def reset(self, seed: int = 0, strength: float | None = None, **row: object) -> str:
        """An empty board; returns the rules. A `strength` in the row replaces the one of the seed."""
        self.rng = random.Random(f"tictactoe-{seed}")
        drawn = self.rng.choice(self.strengths)
        self.strength = drawn if strength is None else strength
        self.board = EMPTY
        return f"You are X. Reply with the number of a free square.\n{shown(self.board)}"

    def step(self, reply: str) -> tuple[str, float, bool]:
        """Play the one digit of a reply, and the opponent's answer to it. A reply that is no free square loses."""
        move = square_in(reply)
        if move is None or move not in free(self.board):
            return f"illegal\n{shown(self.board)}", ILLEGAL, True
        self.board = played(self.board, move, "X")
        if not over(self.board):
            self.board = played(self.board, self.answer(), "O")
        return shown(self.board), reward_of(self.board), over(self.board)

    def answer(self) -> int:
        """The opponent's move: a free square that somebody names, or one by the opponent's strength."""
        if self.opponent is None:
            strong = self.rng.random() < self.strength
            return self.rng.choice(best_moves(self.board, "O") if strong else free(self.board))
        told = f"You are O. Name a free square.\n{shown(self.board)}"
        while (move := square_in(self.opponent(told))) is None or move not in free(self.board):
            pass
        return move

    def state_key(self) -> str:
        """The board: how it came about does not matter."""
        return self.board

    @property
    def won(self) -> bool:
        return winner(self.board) == "X"


def shown(board: str) -> str:
    """Three lines of three squares, and the free ones."""
    lines = ["|".join(board[start : start + 3]) for start in (0, 3, 6)]
    return "\n".join([*lines, f"Free: {' '.join(EMPTY[place] for place in free(board))}"])


def square_in(reply: str) -> int | None:
    """The place (0 to 8) that the only digit of a reply names; else None."""
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


def reward_of(board: str) -> float:
    if not over(board):
        return 0.0
    return {"X": WIN, "O": LOSS, None: DRAW}[winner(board)]


@cache
def value(board: str, mark: str) -> int:
    """1 where `mark`, whose turn it is, can force a win, 0 for a draw, -1 where it loses (minimax)."""
    if over(board):
        return 0 if winner(board) is None else -1  # whoever moved last has won
    return max(-value(played(board, place, mark), other(mark)) for place in free(board))


def best_moves(board: str, mark: str) -> list[int]:
    """All moves that a perfect player may make: to take always the first would be a pattern to learn by heart."""
    values = {place: -value(played(board, place, mark), other(mark)) for place in free(board)}
    return [place for place, worth in values.items() if worth == max(values.values())]


def other(mark: str) -> str:
    return "O" if mark == "X" else "X"


def random_move(game: TicTacToe, rng: random.Random) -> str:
    return EMPTY[rng.choice(free(game.board))]


def best_move(game: TicTacToe, rng: random.Random) -> str:
    """A perfect player, which chooses at random among its best moves."""
    return EMPTY[rng.choice(best_moves(game.board, "X"))]


PLAYERS = {"random": random_move, "perfect": best_move}
