"""How well a scripted player does in an environment: what a policy's figures are compared with."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from lowmem_grpo.runs.accuracy import wilson_interval


class Game(Protocol):
    """An environment of several turns."""

    def reset(self, seed: int = 0, **row: Any) -> str: ...

    def step(self, reply: str) -> Any: ...  # (observation, reward, done)

    @property
    def won(self) -> bool: ...


G = TypeVar("G", bound=Game)
Player = Callable[[G, random.Random], str]  # it looks at the state of the game, and replies


@dataclass(frozen=True)
class Score:
    """A player's results in some games."""

    wins: int
    games: int
    reward: float  # of a game, in the mean
    turns: float  # of a game, in the mean

    @property
    def share(self) -> float:
        return self.wins / self.games

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the share (Wilson)."""
        return wilson_interval(self.share, self.games)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.share:.1%} ({low:.1%} to {high:.1%}) in {self.turns:.2f} turns"


def play(game: G, player: Player[G], row: Mapping[str, Any]) -> tuple[float, int]:
    """One game: the sum of its rewards, and its turns."""
    rng = random.Random(f"player-{row}")
    game.reset(**row)
    total, turns, done = 0.0, 0, False
    while not done:
        _, reward, done = game.step(player(game, rng))
        total, turns = total + reward, turns + 1
    return total, turns


def score(game: G, player: Player[G], rows: Sequence[Mapping[str, Any]]) -> Score:
    """One game for each row."""
    wins, results = 0, []
    for row in rows:
        results.append(play(game, player, row))
        wins += game.won
    rewards, turns = zip(*results, strict=True)
    return Score(wins, len(rows), sum(rewards) / len(rows), sum(turns) / len(rows))


def baselines(game: G, players: Mapping[str, Player[G]], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The share of games that each player wins, by its name."""
    return {name: score(game, player, rows).share for name, player in players.items()}


def won(environments: list[Any], **kwargs: Any) -> list[float]:
    """A reward function: 1 for each game that was won."""
    return [float(environment.won) for environment in environments]
