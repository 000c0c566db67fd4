"""Scripted players in an environment, as baselines for a policy."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar


class Game(Protocol):
    """An environment of several turns."""

    def reset(self, seed: int = 0, **row: Any) -> str: ...

    def step(self, reply: str) -> Any: ...  # (observation, reward, done)

    @property
    def won(self) -> bool: ...


G = TypeVar("G", bound=Game)
Player = Callable[[G, random.Random], str]  # reads the state of the game, and replies


def play(game: G, player: Player[G], row: Mapping[str, Any]) -> tuple[float, int]:
    """Play one game; return the sum of its rewards and its number of turns."""
    rng = random.Random(f"player-{row}")
    game.reset(**row)
    total, turns, done = 0.0, 0, False
    while not done:
        _, reward, done = game.step(player(game, rng))
        total, turns = total + reward, turns + 1
    return total, turns


def baselines(game: G, players: Mapping[str, Player[G]], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of games that each player wins, by the player's name, in one game for each row."""
    wins = dict.fromkeys(players, 0)
    for name, player in players.items():
        for row in rows:
            play(game, player, row)
            wins[name] += game.won
    return {name: count / len(rows) for name, count in wins.items()}


def won(environments: list[Any], **kwargs: Any) -> list[float]:
    """Return 1 for each game that was won, else 0; a reward function."""
    return [float(environment.won) for environment in environments]
