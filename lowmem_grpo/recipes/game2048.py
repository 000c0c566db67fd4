"""Recipe `game2048`: 2048 on a small board. The policy sees the last board only, so each of its moves is a sequence.

    lowmem-grpo run game2048                        # the embedded model, 3x3, in minutes on two CPU cores
    lowmem-grpo run game2048 goal=64 moves=50       # a harder goal
    lowmem-grpo run game2048 gpu=24                 # 4x4, and a model from the hub
    lowmem-grpo generate --recipe game2048 --you beside
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset

from lowmem_grpo.environments.rows import seeded_rows
from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.games.game2048 import PLAYERS, SIZES, Game2048, Size
from lowmem_grpo.recipes.games.playing import baselines, won
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.recipes.presets import Preset, Presets, prepare
from lowmem_grpo.trainer.play import Play

DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/game2048", "seed": 0, "max_steps": 100, "learning_rate": 5e-6, "max_completion_length": 64,
    "max_turn_tokens": 16, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "num_generations": 8,
    "loss_type": "dr_grpo", "scale_rewards": "none", "turn_discount": 0.95, "adam_beta2": 0.99, "max_grad_norm": 0.2,
    "lr_scheduler_type": "linear", "reward_weights": [0.0], "save_steps": 25, "save_total_limit": 2,
}
PRESETS: Presets = {
    "cpu": Preset("tiny-talks", 96, 16, 32, {
        "max_steps": 60, "learning_rate": 3e-3, "max_completion_length": 16, "max_turn_tokens": 4,
        "per_device_train_batch_size": 64, "gradient_accumulation_steps": 1, "num_generations": 8,
        "turn_discount": 0.6, "max_grad_norm": 1.0, "save_steps": 20,
    }),
    "16": Preset("Qwen/Qwen2.5-1.5B-Instruct", 512, 32, 64, {"optim": "paged_adamw_8bit"}),
    "24": Preset("Qwen/Qwen2.5-3B-Instruct", 512, 32, 64, {"optim": "paged_adamw_8bit"}),
    "48": Preset("Qwen/Qwen2.5-7B-Instruct", 512, 32, 64, {"optim": "paged_adamw_8bit"}),
    "80": Preset("meta-llama/Llama-3.1-8B-Instruct", 512, 64, 128, {"optim": "adamw_8bit"}),
}
OF_TINY, OF_OTHERS = 3, 4  # tiles in a row


@dataclass
class Game2048Options(RecipeOptions):
    gradient_checkpointing_mode: str = "none"
    """Gradient checkpointing: layer inputs wait in host memory ("offload"), on the card ("device"), or "none"."""
    side: int | None = None
    """Tiles in a row: 3 or 4; None takes 3 for an embedded model and 4 for others."""
    goal: int | None = None
    """The tile that wins; None: 32 on the board of 3x3, 256 on that of 4x4."""
    moves: int | None = None
    """Moves in a game; None: 25 on the board of 3x3, 250 on that of 4x4."""
    eval_problems: int = 256
    """Held-out games before and after training."""

    def __post_init__(self) -> None:
        self.size(tiny=True)

    def size(self, tiny: bool) -> Size:
        """The board of a model, which is an embedded one or not. ValueError for a board that nobody plays on."""
        side = (OF_TINY if tiny else OF_OTHERS) if self.side is None else self.side
        if side not in SIZES:
            raise ValueError(f"side is {side}; it must be {' or '.join(map(str, SIZES))}")
        usual = SIZES[side]
        return Size(side, usual.goal if self.goal is None else self.goal,
                    usual.moves if self.moves is None else self.moves)


OPTIONS = Game2048Options


def make_dataset(size: int, seed: int = 0, side: int | None = None) -> Dataset:
    """`size` games that are never trained on, each with a `seed`, and with a `side` where one is given."""
    extra = {} if side is None else {"side": side}
    return Dataset.from_list([row | extra for row in seeded_rows(size, seed, held_out=True)])


EXAM = Exam(lambda size, seed, source: make_dataset(size, seed, OF_OTHERS), won, max_tokens=64, play=Play(Game2048),
            of_tiny=lambda size, seed, source: make_dataset(size, seed, OF_TINY))


def run(options: Game2048Options) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    game = partial(Game2048, options.size(setup.is_tiny))
    test = make_dataset(options.eval_problems, setup.config.seed)
    known = baselines(game(), PLAYERS, list(test))
    teach(setup, Lesson("game2048", None, [won], test, won, play=Play(game), facts={"baselines": known}))
