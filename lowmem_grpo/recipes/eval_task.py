"""The EXAM of a recipe, with which `lowmem-grpo eval --recipe` tests a model, and the baselines of games."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from datasets import Dataset

from lowmem_grpo.config.sampling import EpisodeSettings
from lowmem_grpo.environments.env_spec import seeded_rows
from lowmem_grpo.models.stored_model import EMBEDDED
from lowmem_grpo.recipes.options import RecipeOptions, parse, recalled
from lowmem_grpo.recipes.recipe_file import NO_EXAM, find_recipe, summary_of
from lowmem_grpo.trainer.play import Play

EPISODES = ("chat_template_kwargs", *(entry.name for entry in fields(EpisodeSettings)))  # settings of GRPOConfig


@dataclass(frozen=True)
class Exam:
    """Held-out problems, and what counts as a right answer."""

    problems: Callable[[int, int, str | None], Any]
    """(size, seed, source or None) -> a dataset with `prompt` and the columns that `right` reads."""
    right: Callable[..., Any]  # a reward function that pays more than 0 for a right answer, or a verifier
    max_tokens: int
    size: int = 256  # number of problems, unless --limit gives another
    takes_source: bool = False  # whether problems can come from a file or a hub dataset (--dataset)
    play: Play | None = None  # how an episode is played, where an answer takes several turns
    of_tiny: Callable[[int, int, str | None], Any] | None = None
    """The problems for an embedded model, where it is trained on others."""
    tiny_max_tokens: int | None = None  # `max_tokens` for an embedded model, if it is less
    of_options: Callable[[Any, bool], dict[str, Any]] | None = None
    """(the recipe's options, whether the model is embedded) -> the fields of this class that they change."""

    def with_options(self, options: Any, model: str) -> "Exam":
        """Return the exam of a run with these options of the recipe."""
        own = {} if self.of_options is None else self.of_options(options, model in EMBEDDED)
        return replace(self, **{"size": getattr(options, "eval_problems", self.size),
                                **({"of_tiny": None} if "problems" in own else {}), **own})

    def problems_of(self, model: str) -> Callable[[int, int, str | None], Any]:
        """Return the function that makes the problems for this model; embedded models may have their own."""
        return self.of_tiny if self.of_tiny is not None and model in EMBEDDED else self.problems

    def max_tokens_of(self, model: str) -> int:
        return self.tiny_max_tokens if self.tiny_max_tokens is not None and model in EMBEDDED else self.max_tokens


def find_exam(recipe: str) -> Exam:
    """Return the exam of a recipe or a recipe file. Raises ValueError for an unknown recipe, or one without an exam."""
    exam = getattr(find_recipe(recipe), "EXAM", None)
    if not isinstance(exam, Exam):
        raise ValueError(NO_EXAM.format(recipe))
    return exam


def recorded_by(adapter: Path | None, recipe: str) -> dict[str, Any]:
    """Return summary.json of the run that saved the adapter, if it was a run of this recipe; else an empty dict."""
    return {} if adapter is None else summary_of(adapter.absolute().parent, recipe)


def seed_in(run: Mapping[str, Any]) -> int:
    """Return the seed of a run, given its summary; 0 if the summary has none."""
    return run["seed"] if isinstance(run.get("seed"), int) else 0


def exam_as_trained(recipe: str, model: str, run: Mapping[str, Any], words: Sequence[str]) -> tuple[Exam, str]:
    """Return the exam of a recipe with the options and the episodes of a run, given its summary, and with `words`
    (key=value) in place of the run's; and what the run decided, in words. ValueError for options that do not fit."""
    exam, kind = find_exam(recipe), getattr(find_recipe(recipe), "OPTIONS", RecipeOptions)
    recorded, config = run.get("options") or {}, run.get("config") or {}
    if recorded or words:
        exam = exam.with_options(recalled(kind, recorded, words), model)
    if exam.play is not None:
        episodes = {name: config[name] for name in EPISODES if name in config}
        exam = replace(exam, play=replace(exam.play, settings=exam.play.settings | episodes))
    usual, asked = {entry.name: entry.default for entry in fields(kind)}, parse([*words])
    said = [f"{name}={value}" if name in usual else f"not {name}={value}, which the recipe no longer has"
            for name, value in recorded.items() if name not in asked and value != usual.get(name)]
    return exam, ", ".join(said)


class Game(Protocol):
    def reset(self, seed: int = 0, **row: Any) -> str: ...

    def step(self, reply: str) -> Any: ...  # (observation, reward, done)

    @property
    def won(self) -> bool: ...


G = TypeVar("G", bound=Game)
Player = Callable[[G, random.Random], str]  # reads the state of the game, and replies


def held_out_games(size: int, seed: int = 0, **columns: Any) -> Dataset:
    """Return `size` games that are never trained on, each with a `seed`, and with those `columns` that are not None."""
    own = {name: value for name, value in columns.items() if value is not None}
    return Dataset.from_list([row | own for row in seeded_rows(size, seed, held_out=True)])


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
    """Return the share of games that each player wins, by the player's name. Each plays one game per dataset row."""
    wins = dict.fromkeys(players, 0)
    for name, player in players.items():
        for row in rows:
            play(game, player, row)
            wins[name] += game.won
    return {name: count / len(rows) for name, count in wins.items()}


def won(environments: list[Any], **kwargs: Any) -> list[float]:
    """Return 1 for each game that was won, else 0; a reward function."""
    return [float(environment.won) for environment in environments]
