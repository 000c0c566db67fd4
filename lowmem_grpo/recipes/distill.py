"""Recipe `distill`: a student learns a teacher's distribution at each token that it samples itself. No rewards.

    lowmem-grpo run arithmetic                                  # trains the teacher, an adapter
    lowmem-grpo run distill teacher=runs/arithmetic             # the student begins as the base model
    lowmem-grpo run distill teacher=Qwen/Qwen2.5-7B-Instruct    # on a card: a larger model with the same tokens

The problems are those of `proximity`: word problems for hub models, steps of arithmetic for the embedded model.
"""

from dataclasses import dataclass
from typing import ClassVar

from lowmem_grpo import DistillationTrainer
from lowmem_grpo.config.distillation import DistillationConfig
from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.models.stored_model import EMBEDDED
from lowmem_grpo.recipes import proximity
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import ProblemOptions
from lowmem_grpo.recipes.presets import CPU, USUAL, Preset, Presets, either, on_cards, prepare
from lowmem_grpo.recipes.proximity import RIGHT, STEPS, WORDS, make_dataset
from lowmem_grpo.runs.saved_adapter import adapter_at, adapter_settings, base_of_adapter
from lowmem_grpo.trainer.teaching import check_teacher

SETTINGS = DistillationConfig
DEFAULTS = USUAL | {
    "output_dir": "runs/distill", "max_steps": 100, "learning_rate": 1e-4, "max_completion_length": 512,
}
PRESETS: Presets = {
    "cpu": Preset("tiny", 128, 16, 32, {
        "max_steps": 28, "learning_rate": 3e-3, "max_completion_length": 64, "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "save_steps": 7,
    }),
} | on_cards(1024)


@dataclass
class DistillOptions(ProblemOptions):
    eval_problems: int = 512

    settings: ClassVar[type[GRPOConfig]] = SETTINGS

    def follow(self, teacher: str | None) -> None:
        """Take the base model and the LoRA settings of a teacher that is an adapter, where no others are asked for."""
        if teacher is None or (folder := adapter_at(teacher)) is None:
            return
        lora = adapter_settings(folder)
        self.model = either(self.model, base_of_adapter(folder).model)
        self.lora_rank, self.lora_alpha = either(self.lora_rank, lora["r"]), either(self.lora_alpha, lora["lora_alpha"])
        if self.model in EMBEDDED and self.gpu == "auto":
            self.gpu = CPU  # the preset of embedded models, on a card too


OPTIONS = DistillOptions
EXAM = proximity.EXAM


def run(options: DistillOptions) -> None:
    options.follow(options.config.get("teacher"))
    setup = prepare(options, DEFAULTS, PRESETS)
    check_teacher(setup.config)
    task, seed = STEPS if setup.is_tiny else WORDS, setup.config.seed
    teach(setup, Lesson("distill", make_dataset("train", options.train_size, seed, task), [],
                        make_dataset("test", options.eval_problems, seed, task), RIGHT, trainer=DistillationTrainer,
                        facts={"teacher": setup.config.teacher}))
