"""Recipe `guess`: find a hidden number by listening to "higher" and "lower". There is no data: each game is of a seed.

    lowmem-grpo run guess                           # the embedded model of the games, in minutes on two CPU cores
    lowmem-grpo run guess largest=64 tries=6        # harder
    lowmem-grpo run guess turn_discount=1           # each turn is paid for what followed it
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset

from lowmem_grpo.environments.rows import seeded_rows
from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.games.guess import PLAYERS, Guess
from lowmem_grpo.recipes.games.playing import baselines, won
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.recipes.presets import Preset, Presets, prepare
from lowmem_grpo.trainer.play import Play

DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/guess", "seed": 0, "max_steps": 100, "learning_rate": 5e-6, "max_completion_length": 512,
    "max_turn_tokens": 48, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "num_generations": 8,
    "loss_type": "dr_grpo", "scale_rewards": "none", "adam_beta2": 0.99, "max_grad_norm": 0.2,
    "lr_scheduler_type": "linear", "reward_weights": [0.0], "save_steps": 25, "save_total_limit": 2,
}
PRESETS: Presets = {
    "cpu": Preset("tiny-games", 256, 16, 32, {
        "max_steps": 64, "learning_rate": 3.5e-3, "max_completion_length": 160, "max_turn_tokens": 4,
        "per_device_train_batch_size": 96, "gradient_accumulation_steps": 4, "num_generations": 8,
        "turn_discount": 1.0, "max_grad_norm": 1.0, "save_steps": 16,
    }),
    "16": Preset("Qwen/Qwen2.5-1.5B-Instruct", 1024, 32, 64, {"optim": "paged_adamw_8bit"}),
    "24": Preset("Qwen/Qwen2.5-3B-Instruct", 1024, 32, 64, {"optim": "paged_adamw_8bit"}),
    "48": Preset("Qwen/Qwen2.5-7B-Instruct", 1024, 32, 64, {"optim": "paged_adamw_8bit"}),
    "80": Preset("meta-llama/Llama-3.1-8B-Instruct", 1024, 64, 128, {"optim": "adamw_8bit"}),
}


@dataclass
class GuessOptions(RecipeOptions):
    gradient_checkpointing_mode: str = "none"
    """Gradient checkpointing: layer inputs wait in host memory ("offload"), on the card ("device"), or "none"."""
    largest: int = 32
    """The hidden number is from 1 to this one."""
    tries: int = 5
    """Guesses in a game. Halving finds one of 2^tries - 1 numbers."""
    eval_problems: int = 256
    """Held-out games before and after training."""

    def __post_init__(self) -> None:
        Guess(self.largest, self.tries)  # refuses what cannot be played


OPTIONS = GuessOptions


def make_dataset(size: int, seed: int = 0) -> Dataset:
    """`size` games that are never trained on, each with a `seed`."""
    return Dataset.from_list(seeded_rows(size, seed, held_out=True))


EXAM = Exam(lambda size, seed, source: make_dataset(size, seed), won, max_tokens=512, play=Play(Guess))


def run(options: GuessOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    game, test = partial(Guess, options.largest, options.tries), make_dataset(options.eval_problems, setup.config.seed)
    known = baselines(game(), PLAYERS, list(test))
    teach(setup, Lesson("guess", None, [won], test, won, play=Play(game), facts={"baselines": known}))
