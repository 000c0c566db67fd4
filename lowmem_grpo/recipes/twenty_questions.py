"""Recipe `twenty_questions`: ask what helps to find out what the base model thinks of. It answers, and is not trained.

    lowmem-grpo run twenty_questions                # the embedded model, in minutes on two CPU cores
    lowmem-grpo run twenty_questions turns=5        # one question less
    lowmem-grpo run twenty_questions gpu=24         # 100 things, and a model from the hub
    lowmem-grpo generate --recipe twenty_questions --you against   # you think of something, the model asks
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from datasets import Dataset

from lowmem_grpo.environments.rows import seeded_rows
from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.games.playing import baselines, won
from lowmem_grpo.recipes.games.twenty_questions import NUMBERS, PLAYERS, WORLDS, Things, TwentyQuestions, answered_truly
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.recipes.presets import Preset, Presets, prepare
from lowmem_grpo.trainer.play import Play

DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/twenty_questions", "seed": 0, "max_steps": 200, "learning_rate": 5e-6,
    "max_completion_length": 1536, "max_turn_tokens": 48, "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 8, "num_generations": 8, "loss_type": "dr_grpo", "scale_rewards": "none",
    "adam_beta2": 0.99, "max_grad_norm": 0.2, "lr_scheduler_type": "linear", "reward_weights": [0.0],
    "turn_discount": 1.0, "save_steps": 25, "save_total_limit": 2,
}
PRESETS: Presets = {
    "cpu": Preset("tiny-talks", 256, 16, 32, {
        "max_steps": 64, "learning_rate": 3e-3, "max_completion_length": 160, "max_turn_tokens": 8,
        "per_device_train_batch_size": 128, "gradient_accumulation_steps": 2, "num_generations": 8,
        "max_grad_norm": 1.0, "save_steps": 16,
    }),
    "16": Preset("Qwen/Qwen2.5-1.5B-Instruct", 2048, 32, 64, {"optim": "paged_adamw_8bit"}),
    "24": Preset("Qwen/Qwen2.5-3B-Instruct", 2048, 32, 64, {"optim": "paged_adamw_8bit"}),
    "48": Preset("Qwen/Qwen2.5-7B-Instruct", 2048, 32, 64, {"optim": "paged_adamw_8bit"}),
    "80": Preset("meta-llama/Llama-3.1-8B-Instruct", 2048, 64, 128, {"optim": "adamw_8bit"}),
}
OF_TINY, OF_OTHERS = WORLDS


@dataclass
class TwentyQuestionsOptions(RecipeOptions):
    gradient_checkpointing_mode: str = "none"
    """Gradient checkpointing: layer inputs wait in host memory ("offload"), on the card ("device"), or "none"."""
    world: str | None = None
    """What can be thought of: "numbers" (1 to 16; the game says which are left) or "things" (100 of them); None takes
    numbers for an embedded model and things for others."""
    turns: int | None = None
    """Questions and guesses in a game; None: 6 for numbers, 20 for things."""
    eval_problems: int = 256
    """Held-out games before and after training."""

    def __post_init__(self) -> None:
        self.chosen(tiny=True)

    def chosen(self, tiny: bool) -> Things:
        """The world for a model, which is an embedded one or not. ValueError for one that does not exist."""
        name = (OF_TINY if tiny else OF_OTHERS) if self.world is None else self.world
        if name not in WORLDS:
            raise ValueError(f"world is {name!r}; it must be {' or '.join(WORLDS)}")
        usual = WORLDS[name]
        return replace(usual, turns=usual.turns if self.turns is None else self.turns)


OPTIONS = TwentyQuestionsOptions


def make_dataset(size: int, seed: int = 0, world: str | None = None) -> Dataset:
    """`size` games that are never trained on, each with a `seed`, and with a `world` where one is given."""
    extra = {} if world is None else {"world": world}
    return Dataset.from_list([row | extra for row in seeded_rows(size, seed, held_out=True)])


EXAM = Exam(lambda size, seed, source: make_dataset(size, seed, OF_OTHERS), won, max_tokens=1536,
            play=Play(TwentyQuestions), of_tiny=lambda size, seed, source: make_dataset(size, seed, OF_TINY),
            tiny_max_tokens=160)


def run(options: TwentyQuestionsOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    world = options.chosen(setup.is_tiny)
    test = make_dataset(options.eval_problems, setup.config.seed)
    known = baselines(answered_truly(world), PLAYERS, list(test)) if world.things == NUMBERS else {}
    play = Play(partial(TwentyQuestions, world))
    teach(setup, Lesson("twenty_questions", None, [won], test, won, play=play, facts={"baselines": known}))
