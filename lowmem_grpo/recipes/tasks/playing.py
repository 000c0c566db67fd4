"""How well a scripted player does in an environment: what a policy's figures are compared with."""

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
Player = Callable[[G, random.Random], str]  # it looks at the state of the game, and replies


def play(game: G, player: Player[G], row: Mapping[str, Any]) -> tuple[float, int]:
    """Play one game; returns the sum of its rewards, and its turns."""
    rng = random.Random(f"player-{row}")
    game.reset(**row)
    total, turns, done = 0.0, 0, False
    while not done:
        _, reward, done = game.step(player(game, rng))
        total, turns = total + reward, turns + 1
    return total, turns


def baselines(game: G, players: Mapping[str, Player[G]], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of games that each player wins, by its name, in one game for each row."""
    wins = dict.fromkeys(players, 0)
    for name, player in players.items():
        for row in rows:
            play(game, player, row)
            wins[name] += game.won
    return {name: count / len(rows) for name, count in wins.items()}


def won(environments: list[Any], **kwargs: Any) -> list[float]:
    """A reward function: 1 for each game that was won."""
    return [float(environment.won) for environment in environments]
