"""Supervised fine-tuning on a new answer format before GRPO, which can reward a form only once the model writes it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console

from lowmem_grpo import SFTConfig, SFTTrainer
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.recipes.held_out import Answers
from lowmem_grpo.recipes.presets import Setup
from lowmem_grpo.runs.checkpoint import last_good

SFT = "sft"  # the warm-up's folder in that of the run
SHARED = ("seed", "optim", "bf16", "fp16", "max_tokens_per_micro_batch", "logits_chunk", "disable_tqdm")


@dataclass(frozen=True)
class WarmUp:
    """What is taught before GRPO begins, and how one sees that it was learnt."""

    demonstrations: Callable[[int, int], Dataset]
    """(how many, seed) -> distinct rows `prompt`, `completion`."""
    steps: int
    form: str
    """The format in a word or two, for people."""
    has_form: Callable[[str], bool]
    """Whether a completion is written in it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of SFTConfig; those that GRPOConfig has too are otherwise as in the run."""

    def is_over(self, setup: Setup) -> bool:
        """Whether the run goes on from a checkpoint, which has been taught already."""
        return setup.resume and bool(last_good(Path(setup.config.output_dir))[0])

    def teach(self, model: FastPeftModel, setup: Setup, console: Console) -> bool:
        """Teach the format; False where Ctrl-C stopped it."""
        result = self.trainer(model, setup).train()
        if not result.finished:
            console.print(f"stopped in step {result.global_step} of the warm-up; with resume=true it begins again")
        return result.finished

    def trainer(self, model: FastPeftModel, setup: Setup) -> SFTTrainer:
        """Fine-tuning on rows that are each seen once."""
        config = setup.config
        shared = {name: getattr(config, name) for name in SHARED}
        settings = SFTConfig(**(shared | self.settings | {
            "output_dir": f"{config.output_dir}/{SFT}", "max_steps": self.steps,
            "overwrite_output_dir": config.overwrite_output_dir or setup.resume,
        }))
        rows = self.demonstrations(self.steps * settings.batch_size, config.seed)
        return SFTTrainer(model, rows, settings)

    def told(self, before: Answers, after: Answers, console: Console) -> dict[str, float]:
        """What teaching has changed, said and for summary.json."""
        shares = before.share(self.has_form), after.share(self.has_form)
        console.print(
            f"answers as `{self.form}`: {shares[0]:.1%} before, {shares[1]:.1%} after {self.steps} steps of "
            f"fine-tuning; accuracy {after.accuracy:.1%}", soft_wrap=True, markup=False,
        )
        return {"accuracy_after_sft": after.accuracy, "taught_format_before": shares[0],
                "taught_format_after_sft": shares[1]}

    def told_after(self, after: Answers, console: Console) -> dict[str, float]:
        """The share of answers in the format when GRPO has ended, said and for summary.json."""
        share = after.share(self.has_form)
        console.print(f"answers as `{self.form}`: {share:.1%} after GRPO", markup=False)
        return {"taught_format_after": share}
