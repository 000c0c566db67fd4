"""Supervised fine-tuning on a new answer format before GRPO, which can only reward a format that the model writes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console

from lowmem_grpo import SFTConfig, SFTTrainer
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.recipes.presets import Setup
from lowmem_grpo.runs.accuracy import Answers
from lowmem_grpo.runs.saved_adapter import last_good
from lowmem_grpo.runs.views.console import print_line

SFT = "sft"  # folder of the warm-up inside that of the run
SHARED = ("seed", "optim", "bf16", "fp16", "max_tokens_per_micro_batch", "logits_chunk", "disable_tqdm")


@dataclass(frozen=True)
class WarmUp:
    """A format that is taught before GRPO begins."""

    demonstrations: Callable[[int, int], Dataset]  # (size, seed) -> different rows with `prompt` and `completion`
    steps: int
    form: str  # the format, as messages show it
    has_form: Callable[[str], bool]  # whether a completion has the format
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of SFTConfig. Other fields that GRPOConfig has too are as in the run."""

    def is_over(self, setup: Setup) -> bool:
        """Return whether the run resumes from a checkpoint, whose adapter was fine-tuned already."""
        return setup.resume and bool(last_good(Path(setup.config.output_dir))[0])

    def teach(self, model: FastPeftModel, setup: Setup, console: Console) -> bool:
        """Teach the format; return False if it was stopped. Raises SystemExit after Ctrl-C."""
        trainer = self.trainer(model, setup)
        result = trainer.train()
        if not result.finished:
            console.print(f"stopped in step {result.global_step} of the warm-up; with resume=true it begins again")
        if trainer.interrupt.requested:
            raise SystemExit(trainer.interrupt.exit_status)
        return result.finished

    def trainer(self, model: FastPeftModel, setup: Setup) -> SFTTrainer:
        """Return the trainer of the warm-up, with the run's values of SHARED unless `settings` has others."""
        config = setup.config
        shared = {name: getattr(config, name) for name in SHARED}
        settings = SFTConfig(**({"save_strategy": "no"} | shared | self.settings | {
            "output_dir": f"{config.output_dir}/{SFT}", "max_steps": self.steps,
            "overwrite_output_dir": config.overwrite_output_dir or setup.resume,
        }))
        rows = self.demonstrations(self.steps * settings.batch_size, config.seed)
        return SFTTrainer(model, rows, settings)

    def share(self, answers: Answers) -> float:
        """Return the share of answers in the format."""
        return sum(self.has_form(texts[0]) for texts in answers.texts) / len(answers.texts)

    def report_taught(self, before: Answers, after: Answers, console: Console) -> dict[str, float]:
        """Print how fine-tuning changed the answers; return entries for summary.json."""
        shares = self.share(before), self.share(after)
        print_line(console, f"answers as `{self.form}`: {shares[0]:.1%} before, {shares[1]:.1%} after "
                            f"{self.steps} steps of fine-tuning; accuracy {after.accuracy:.1%}")
        return {"accuracy_after_sft": after.accuracy, "taught_format_before": shares[0],
                "taught_format_after_sft": shares[1]}

    def report_kept(self, after: Answers, console: Console) -> dict[str, float]:
        """Print the share of answers in the format after GRPO; return it for summary.json."""
        share = self.share(after)
        console.print(f"answers as `{self.form}`: {share:.1%} after GRPO", markup=False)
        return {"taught_format_after": share}
