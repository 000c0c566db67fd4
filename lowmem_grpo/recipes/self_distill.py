"""Recipe `self_distill`: a model learns from itself, since as its own teacher it reads a worked solution (SDFT).

    lowmem-grpo run self_distill                                # model and settings fit the card, or gpu=24
    lowmem-grpo run self_distill teacher=ema                    # the teacher follows the model

There are no rewards. The problems are those of `proximity`. A hub model can read a solution in its prompt. The embedded
model cannot, so an adapter, the teacher, first learns by SFT to copy the solution that it reads.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from datasets import Dataset

from lowmem_grpo import SDFTTrainer
from lowmem_grpo.config.distillation import SDFTConfig
from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.recipes import proximity
from lowmem_grpo.recipes.lesson import SFT, Lesson, WarmUp, load_model, teach
from lowmem_grpo.recipes.options import ProblemOptions
from lowmem_grpo.recipes.presets import USUAL, Preset, Presets, Setup, on_cards, prepare
from lowmem_grpo.recipes.proximity import RIGHT, STEPS, WORDS, Task, make_dataset, make_demonstrations
from lowmem_grpo.rollout.teacher_prompts import COLUMN
from lowmem_grpo.runs.records import FINAL
from lowmem_grpo.utils import at_least

SETTINGS = SDFTConfig
DEFAULTS = USUAL | {
    "output_dir": "runs/self_distill", "max_steps": 100, "learning_rate": 1e-4, "max_completion_length": 512,
    "num_generations": 2,
}
PRESETS: Presets = {
    "cpu": Preset("tiny", 192, 16, 32, {
        "max_steps": 28, "learning_rate": 3e-3, "max_completion_length": 64, "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "save_steps": 7, "distillation_mode": "full_logits",
        "distillation_alpha": 1.0,
    }),
} | on_cards(1024)
READING = {"learning_rate": 4e-3, "per_device_train_batch_size": 32, "adam_beta2": 0.99, "lr_scheduler_type": "cosine",
           "logging_steps": 10}  # how an embedded model learns to read
LINES = replace(STEPS, solution=lambda lines, answer: "\n".join([*lines, f"Answer: {answer}"]))  # as the model writes


@dataclass
class SelfDistillOptions(ProblemOptions):
    eval_problems: int = 512
    reading_steps: int = 120
    """The number of SFT steps in which the embedded model's teacher learns to read a solution."""

    settings: ClassVar[type[GRPOConfig]] = SETTINGS
    RANGES = ProblemOptions.RANGES | {"reading_steps": at_least(1)}


OPTIONS = SelfDistillOptions
EXAM = proximity.EXAM


def make_solved(size: int, seed: int = 0, task: Task = WORDS) -> Dataset:
    """Return `size` different training problems, with columns `prompt` and `privileged_context` (a solution)."""
    return make_demonstrations(size, seed, task).rename_column("completion", COLUMN)


def make_reading(size: int, seed: int, template: str) -> Dataset:
    """Return rows whose prompt has the solution as a teacher reads it, and whose `completion` is that solution."""
    solved = make_solved(size, seed + 1, LINES)
    texts = [template.format(prompt=row["prompt"][0]["content"], **{COLUMN: row[COLUMN]}) for row in solved]
    return Dataset.from_dict({"prompt": [LINES.prompt(text) for text in texts], "completion": solved[COLUMN]})


def reading_teacher(setup: Setup, steps: int, template: str) -> Path:
    """Return an adapter of the embedded model that copies the solution in its prompt; train it unless it is there."""
    folder = Path(setup.config.output_dir) / SFT
    if not (setup.resume and (folder / FINAL).is_dir()):
        rows = partial(make_reading, template=template)
        WarmUp(rows, steps, LINES.form, LINES.has_form, READING).trainer(load_model(setup)[0], setup).train()
    return folder / FINAL


def run(options: SelfDistillOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    task, seed = LINES if setup.is_tiny else WORDS, setup.config.seed
    if setup.is_tiny and "teacher" not in options.config:
        template = options.config.get("teacher_prompt_template", SETTINGS.teacher_prompt_template)
        setup.config.teacher = str(reading_teacher(setup, options.reading_steps, template))
    teach(setup, Lesson("self_distill", make_solved(options.train_size, seed, task), [],
                        make_dataset("test", options.eval_problems, seed, task), RIGHT, trainer=SDFTTrainer,
                        facts={"teacher": setup.config.teacher}))
