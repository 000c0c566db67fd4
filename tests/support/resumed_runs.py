"""Runs that are stopped, and what they leave."""

from pathlib import Path
from typing import Any

from trainer_runs import TEXTS as ROWS
from trainer_runs import digit_sum

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.runs.records import read_lines

SETTINGS: dict[str, Any] = {
    "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 24, "max_steps": 6,
    "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 2, "save_steps": 100, "beta": 0.02,
}
TIMES = ("elapsed", "step_time", "tokens_per_second")


def make(
    folder: str | Path, reward: Any = digit_sum, rows: Any = ROWS, callbacks: Any = (), eval_dataset: Any = None,
    **settings: Any,
) -> GRPOTrainer:
    """A trainer of the embedded model, with dropout."""
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(bare, r=4, lora_dropout=0.1, use_gradient_checkpointing=False)
    config = GRPOConfig(output_dir=str(folder), **(SETTINGS | settings))
    return GRPOTrainer(model, reward, config, rows, eval_dataset, callbacks=list(callbacks))


class StopAt:
    """Asks for a stop after a step."""

    def __init__(self, stop: int) -> None:
        self.stop = stop

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.stop


def records(folder: Path, completions: bool = True) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The metrics that do not depend on the machine's pace and memory, and the completions."""
    lines = read_lines(folder / "metrics.jsonl")
    kept = [{k: v for k, v in line.items() if k not in TIMES and not k.startswith(("time/", "memory/"))}
            for line in lines]
    return kept, read_lines(folder / "completions.jsonl") if completions else []
