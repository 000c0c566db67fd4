"""Recipe `tictactoe`: win as X against opponents of mixed strength. The opponent is part of the environment.

    lowmem-grpo run tictactoe                       # the embedded model of the games, in minutes on two CPU cores
    lowmem-grpo run tictactoe strengths=1           # train against perfect play only
    lowmem-grpo run tictactoe test_strength=1       # measure against perfect play
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset

from lowmem_grpo.environments.rows import seeded_rows
from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.games.playing import baselines, won
from lowmem_grpo.recipes.games.tictactoe import PLAYERS, TicTacToe
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.recipes.presets import Preset, Presets, prepare
from lowmem_grpo.trainer.play import Play

DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/tictactoe", "seed": 0, "max_steps": 200, "learning_rate": 5e-6, "max_completion_length": 768,
    "max_turn_tokens": 48, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "num_generations": 8,
    "loss_type": "dr_grpo", "scale_rewards": "none", "adam_beta2": 0.99, "max_grad_norm": 0.2,
    "lr_scheduler_type": "linear", "reward_weights": [0.0], "save_steps": 25, "save_total_limit": 2,
}
PRESETS: Presets = {
    "cpu": Preset("tiny-games", 320, 16, 32, {
        "max_steps": 120, "learning_rate": 1e-3, "max_completion_length": 256, "max_turn_tokens": 4,
        "per_device_train_batch_size": 128, "gradient_accumulation_steps": 1, "num_generations": 8,
        "max_grad_norm": 1.0,
    }),
    "16": Preset("Qwen/Qwen2.5-1.5B-Instruct", 1280, 32, 64, {"optim": "paged_adamw_8bit"}),
    "24": Preset("Qwen/Qwen2.5-3B-Instruct", 1280, 32, 64, {"optim": "paged_adamw_8bit"}),
    "48": Preset("Qwen/Qwen2.5-7B-Instruct", 1280, 32, 64, {"optim": "paged_adamw_8bit"}),
    "80": Preset("meta-llama/Llama-3.1-8B-Instruct", 1280, 64, 128, {"optim": "adamw_8bit"}),
}


@dataclass
class TicTacToeOptions(RecipeOptions):
    gradient_checkpointing_mode: str = "none"
    """Gradient checkpointing: layer inputs wait in host memory ("offload"), on the card ("device"), or "none"."""
    strengths: str = "0,0,0.5,1"
    """Of opponents in training: the chance that a move is the best one, from 0 (random) to 1 (perfect). A game draws
    one of these."""
    test_strength: float = 0.0
    """Of the opponent before and after training."""
    eval_problems: int = 256
    """Held-out games before and after training."""

    def __post_init__(self) -> None:
        if not 0 <= self.test_strength <= 1:
            raise ValueError(f"test_strength is {self.test_strength}; it must be from 0 (random) to 1 (perfect)")
        self.mixed()

    def mixed(self) -> tuple[float, ...]:
        """The strengths as numbers. ValueError where they are none."""
        try:
            strengths = tuple(float(word) for word in self.strengths.split(","))
        except ValueError:
            raise ValueError(
                f"strengths is {self.strengths!r}; give numbers with commas between them: 0,0.5,1"
            ) from None
        return TicTacToe(strengths).strengths


OPTIONS = TicTacToeOptions


def make_dataset(size: int, seed: int = 0, strength: float = 0.0) -> Dataset:
    """`size` games that are never trained on, each with a `seed` and the `strength` of the opponent."""
    return Dataset.from_list([row | {"strength": strength} for row in seeded_rows(size, seed, held_out=True)])


EXAM = Exam(lambda size, seed, source: make_dataset(size, seed), won, max_tokens=768, play=Play(TicTacToe))


def run(options: TicTacToeOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    test = make_dataset(options.eval_problems, setup.config.seed, options.test_strength)
    known = baselines(TicTacToe(), PLAYERS, list(test))
    play = Play(partial(TicTacToe, options.mixed()))
    teach(setup, Lesson("tictactoe", None, [won], test, won, play=play, facts={"baselines": known}))
