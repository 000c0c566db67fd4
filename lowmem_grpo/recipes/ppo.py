"""Recipe `ppo`: PPO with one completion of each prompt, under a reward that likes some prompts better than others.

    lowmem-grpo run ppo                                      # model and settings fit the card, or gpu=24
    lowmem-grpo run ppo advantage_estimator=reinforce++      # the same without a critic

A reward model's scores are comparable only between answers to the same prompt: here each prompt that has a certain word
is paid more, whatever the answer. GRPO would compare several answers. With one, a critic has to know the prompt's part.
The problems are those of `proximity`.
"""

from collections.abc import Callable
from typing import Any

from lowmem_grpo.losses.advantages import GAE
from lowmem_grpo.recipes import proximity
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import ProblemOptions
from lowmem_grpo.recipes.presets import Preset, Presets, on_cards, prepare
from lowmem_grpo.recipes.proximity import RIGHT, STEPS, WORDS, make_dataset

DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/ppo", "seed": 0, "max_steps": 100, "learning_rate": 1e-5, "gradient_accumulation_steps": 8,
    "advantage_estimator": "gae", "num_generations": 1, "max_completion_length": 512, "adam_beta2": 0.99,
    "max_grad_norm": 0.2, "save_steps": 25, "save_total_limit": 2,
}
PRESETS: Presets = {
    "cpu": Preset("tiny", 128, 16, 32, {
        "max_steps": 40, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_completion_length": 64,
        "per_device_train_batch_size": 128, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "save_steps": 10,
    }),
} | on_cards(1024)
OF_CRITIC = {"critic_warmup_steps": 10}
OF_TINY_CRITIC = {"critic_learning_rate": 3e-3}
POINTS = 3.0  # for each time that the prompt has the word
LIKED = {True: "Multiply", False: "arrive"}  # by whether the model is tiny

OPTIONS = ProblemOptions
EXAM = proximity.EXAM


def likes(word: str) -> Callable[..., list[float]]:
    """Return a reward function that pays POINTS for each time that a word stands in the prompt."""

    def prompts_part(prompts: list[Any], **kwargs: Any) -> list[float]:
        return [POINTS * prompt[-1]["content"].count(word) for prompt in prompts]

    return prompts_part


def run(options: ProblemOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    if setup.config.advantage_estimator == GAE:
        options.config = OF_CRITIC | (OF_TINY_CRITIC if setup.is_tiny else {}) | options.config
        setup = prepare(options, DEFAULTS, PRESETS)
    task, seed = STEPS if setup.is_tiny else WORDS, setup.config.seed
    teach(setup, Lesson("ppo", make_dataset("train", options.train_size, seed, task),
                        [RIGHT, likes(LIKED[setup.is_tiny])],
                        make_dataset("test", options.eval_problems, seed, task), RIGHT))
