"""How well a scripted player does in an environment: what a policy's figures are compared with."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from lowmem_grpo.runs.accuracy import wilson_interval


class Game(Protocol):
    """An environment of several turns."""

    def reset(self, seed: int = 0, **row: object) -> str: ...

    def step(self, reply: str) -> tuple[str, float, bool]: ...


G = TypeVar("G", bound=Game)
Player = Callable[[G, random.Random], str]  # it looks at the state of the game, and replies


@dataclass(frozen=True)
class Score:
    """What a player made of some games."""

    wins: int  # games that earned more than `won`
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


def play(game: G, player: Player[G], seed: int) -> tuple[float, int]:
    """One game: the sum of its rewards, and its turns."""
    rng = random.Random(f"player-{seed}")
    game.reset(seed=seed)
    total, turns, done = 0.0, 0, False
    while not done:
        _, reward, done = game.step(player(game, rng))
        total, turns = total + reward, turns + 1
    return total, turns


def score(game: G, player: Player[G], games: int = 1000, won: float = 0.5) -> Score:
    """Games with the seeds 0 and up; one is won where it earns more than `won`."""
    if games < 1:
        raise ValueError(f"games is {games}; it must be at least 1")
    results = [play(game, player, seed) for seed in range(games)]
    rewards, turns = zip(*results, strict=True)
    return Score(sum(reward > won for reward in rewards), games, sum(rewards) / games, sum(turns) / games)


def baselines(game: G, players: Mapping[str, Player[G]], games: int = 1000) -> dict[str, dict[str, Any]]:
    """For each player by name: its share of wins, the interval of it, and mean reward and turns, as plain values."""
    found = {name: score(game, player, games) for name, player in players.items()}
    return {name: {"share": one.share, "interval": list(one.interval), "reward": one.reward, "turns": one.turns,
                   "games": games} for name, one in found.items()}
