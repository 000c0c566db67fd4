"""Recipe `game2048`: 2048 on a small board. The policy sees only the current board: each move is its own sequence.

    lowmem-grpo run game2048                        # the embedded model, 3x3, in minutes on two CPU cores
    lowmem-grpo run game2048 goal=64 moves=50       # a harder goal
    lowmem-grpo run game2048 gpu=24                 # 4x4, and a model from the hub
    lowmem-grpo generate --recipe game2048 --you beside
"""

import math
import random
import re
from dataclasses import dataclass
from functools import cache, partial

from lowmem_grpo.environments.protocol import Anew
from lowmem_grpo.recipes.eval_task import Exam, baselines, held_out_games, won
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.recipes.presets import USUAL, Preset, Presets, on_cards, prepare
from lowmem_grpo.trainer.play import Play
from lowmem_grpo.utils import at_least, one_of

DEFAULTS = USUAL | {
    "output_dir": "runs/game2048", "max_steps": 100, "learning_rate": 5e-6, "max_completion_length": 64,
    "max_turn_tokens": 16, "gradient_accumulation_steps": 4, "turn_discount": 0.95, "reward_weights": [0.0],
}
PRESETS: Presets = {
    "cpu": Preset("tiny-talks", 96, 16, 32, {
        "max_steps": 60, "learning_rate": 3e-3, "max_completion_length": 16, "max_turn_tokens": 4,
        "per_device_train_batch_size": 64, "gradient_accumulation_steps": 1,
        "turn_discount": 0.6, "max_grad_norm": 1.0, "save_steps": 20,
    }),
} | on_cards(512)
OF_TINY, OF_OTHERS = 3, 4  # tiles in a row
Board = tuple[tuple[int, ...], ...]  # rows of tiles; 0 is an empty place
FOURS = 0.1  # share of new tiles that are a 4
MOVES = ("left", "down", "right", "up")
WON, INVALID = 2.0, -1.0  # reward of an episode that reaches the goal, and of one with a reply that is no move
IN_VAIN = 0.1  # cost of a move that changes nothing
OF_ALL = 0.2  # weight of the sum of all tiles, relative to the largest tile


@dataclass(frozen=True)
class Size:
    """The side of a board, the tile to reach, and the number of moves allowed."""

    side: int
    goal: int
    moves: int

    def __post_init__(self) -> None:
        if not 2 <= self.side <= 6:
            raise ValueError(f"side is {self.side}; a board has from 2 to 6 tiles in a row")
        if self.goal < 8 or self.goal & (self.goal - 1):
            raise ValueError(f"goal is {self.goal}; it must be 8, 16, 32, or another power of two above")
        if self.moves < 1:
            raise ValueError(f"moves is {self.moves}; it must be at least 1")


GOALS = 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072
SIZES = {3: Size(3, 32, 25), 4: Size(4, 256, 250)}  # reaching the goal takes about half of these moves


class Game2048:
    """An environment in which every turn starts from a new prompt. The seed decides where new tiles appear."""

    def __init__(self, size: Size = SIZES[3]) -> None:
        self.size = size
        self.reset()

    def reset(self, seed: int = 0, side: int | None = None, **row: object) -> str:
        """Start with two tiles; return the prompt. A dataset row's `side` also sets goal and number of moves."""
        if side is not None:
            self.size = SIZES[side]
        self.rng = random.Random(f"2048-{seed}")
        self.board: Board = ((0,) * self.size.side,) * self.size.side
        self.board = self.grown(self.grown(self.board))
        self.left, self.in_vain, self.earned = self.size.moves, 0, 0.0
        return self.shown()

    def step(self, reply: str) -> tuple[Anew, float, bool]:
        """Slide the tiles and add one. A move that changes nothing is wasted; a reply without a move ends the game."""
        move = move_in(reply)
        if not move:
            return Anew(f"That is no move.\n{self.shown()}"), self.pay(INVALID), True
        self.left -= 1
        if move not in possible(self.board):
            self.in_vain += 1
        else:
            self.board = slid(self.board, move)
            self.board = self.board if self.won else self.grown(self.board)
        reached = WON if self.won else worth(self.board, self.size.goal)
        return Anew(self.shown()), self.pay(reached - IN_VAIN * self.in_vain), self.over

    def pay(self, earned: float) -> float:
        """Set the episode's reward so far to `earned`; return its change since the last turn."""
        before, self.earned = self.earned, earned
        return earned - before

    def grown(self, board: Board) -> Board:
        """Return the board with one more tile on a random free square."""
        free = [(y, x) for y, row in enumerate(board) for x, tile in enumerate(row) if not tile]
        place, tile = self.rng.choice(free), 4 if self.rng.random() < FOURS else 2
        return tuple(tuple(tile if (y, x) == place else old for x, old in enumerate(row))
                     for y, row in enumerate(board))

    def shown(self) -> str:
        rows = "\n".join(" ".join(str(tile) for tile in row) for row in self.board)
        return f"2048: reach {self.size.goal}. Reply with a move.\n{rows}\nPossible: {' '.join(possible(self.board))}"

    @property
    def won(self) -> bool:
        return largest(self.board) >= self.size.goal

    @property
    def over(self) -> bool:
        return self.won or not self.left or not possible(self.board)

    def state_key(self) -> str:
        return f"{self.board} {self.left}"


def move_in(reply: str) -> str:
    """Return the only move that a reply names; "" if it names none or several."""
    moves = set(re.findall(r"\b(?:left|down|right|up)\b", reply.lower()))
    return moves.pop() if len(moves) == 1 else ""


@cache
def joined(row: tuple[int, ...]) -> tuple[int, ...]:
    """Slide a row's tiles to its beginning; two equal neighbours merge, and no tile merges twice."""
    tiles, out = [tile for tile in row if tile], []
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
        out.append(tile)
    return (*out, *(0,) * (len(row) - len(out)))


def slid(board: Board, move: str) -> Board:
    """Return the board after a move, before a new tile is added."""
    if move in ("up", "down"):  # as left and right, with rows and columns swapped
        turned = slid(tuple(zip(*board, strict=True)), "left" if move == "up" else "right")
        return tuple(zip(*turned, strict=True))
    if move == "right":
        return tuple(joined(row[::-1])[::-1] for row in board)
    return tuple(joined(row) for row in board)


def possible(board: Board) -> list[str]:
    return [move for move in MOVES if slid(board, move) != board]


def largest(board: Board) -> int:
    return max(max(row) for row in board)


def worth(board: Board, goal: int) -> float:
    total = sum(sum(row) for row in board)
    return (math.log2(largest(board)) + OF_ALL * math.log2(total)) / math.log2(goal)


def random_move(game: Game2048, rng: random.Random) -> str:
    return rng.choice(possible(game.board))


def corner(game: Game2048, rng: random.Random) -> str:
    """Keep the tiles in a corner: play left if that is possible, else down, right, up."""
    return possible(game.board)[0]


def greedy(game: Game2048, rng: random.Random) -> str:
    """Play a move that leaves the most empty squares."""
    empty = {move: sum(row.count(0) for row in slid(game.board, move)) for move in possible(game.board)}
    return rng.choice([move for move, count in empty.items() if count == max(empty.values())])


PLAYERS = {"random": random_move, "corner": corner, "greedy": greedy}


@dataclass
class Game2048Options(RecipeOptions):
    side: int | None = None
    """The side of the board, 3 or 4 tiles. None: 3 for an embedded model, 4 for a hub model."""
    goal: int | None = None
    """The tile that wins. None: 32 on a 3x3 board, 256 on a 4x4 board."""
    moves: int | None = None
    """The most moves in a game. None: 25 on a 3x3 board, 250 on a 4x4 board."""
    eval_problems: int = 256
    """The number of held-out games in each evaluation."""

    RANGES = RecipeOptions.RANGES | {"side": one_of(3, 4), "goal": one_of(*GOALS), "moves": at_least(1)}

    def size(self, tiny: bool) -> Size:
        """Return side, goal and moves for an embedded (`tiny`) or another model."""
        side = (OF_TINY if tiny else OF_OTHERS) if self.side is None else self.side
        usual = SIZES[side]
        return Size(side, usual.goal if self.goal is None else self.goal,
                    usual.moves if self.moves is None else self.moves)


OPTIONS = Game2048Options


EXAM = Exam(lambda size, seed, source: held_out_games(size, seed, side=OF_OTHERS), won, max_tokens=64,
            play=Play(Game2048), of_tiny=lambda size, seed, source: held_out_games(size, seed, side=OF_TINY),
            of_options=lambda options, tiny: {"problems": lambda size, seed, source: held_out_games(size, seed),
                                              "play": Play(partial(Game2048, options.size(tiny)))})


def run(options: Game2048Options) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    game = partial(Game2048, options.size(setup.is_tiny))
    test = held_out_games(options.eval_problems, setup.config.seed)
    known = baselines(game(), PLAYERS, list(test))
    teach(setup, Lesson("game2048", None, [won], test, won, play=Play(game), facts={"baselines": known}))
