"""Recipe `gsm8k`: grade-school maths with the five classic reward functions.

    lowmem-grpo run gsm8k                           # openai/gsm8k; model and settings by the card, or gpu=24
    lowmem-grpo run gsm8k dataset=rows.jsonl        # your own rows: `question`, and `answer` that ends in `#### 42`

The embedded tiny model, which is what a CPU takes, knows no words: three steps show that all runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError

from lowmem_grpo.recipes.exam import Exam
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.recipes.presets import Preset, Presets, prepare
from lowmem_grpo.rewards import (
    SYSTEM_PROMPT,
    correctness_reward_func,
    extract_hash_answer,
    int_reward_func,
    soft_format_reward_func,
    strict_format_reward_func,
    xmlcount_reward_func,
)

REWARDS: list[Callable[..., Any]] = [
    xmlcount_reward_func, soft_format_reward_func, strict_format_reward_func, int_reward_func, correctness_reward_func,
]
DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/gsm8k", "seed": 3407, "learning_rate": 5e-6, "adam_beta2": 0.99, "weight_decay": 0.1,
    "warmup_ratio": 0.1, "lr_scheduler_type": "cosine", "max_grad_norm": 0.1, "max_steps": 250, "num_generations": 8,
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "save_steps": 50,
}
PRESETS: Presets = {
    "cpu": Preset("tiny", 1536, 16, 16, {"max_completion_length": 64, "max_steps": 3, "optim": "adamw_torch"}),
    "16": Preset(
        "Qwen/Qwen2.5-1.5B-Instruct", 1024, 32, 32, {"max_completion_length": 640, "optim": "paged_adamw_8bit"}
    ),
    "24": Preset(
        "Qwen/Qwen2.5-3B-Instruct", 1536, 32, 32, {"max_completion_length": 1024, "optim": "paged_adamw_8bit"}
    ),
    "48": Preset(
        "Qwen/Qwen2.5-7B-Instruct", 2048, 32, 32, {"max_completion_length": 1536, "optim": "paged_adamw_8bit"}
    ),
    "80": Preset(
        "meta-llama/Llama-3.1-8B-Instruct", 4096, 64, 64,
        {"max_completion_length": 3072, "optim": "adamw_8bit", "gradient_accumulation_steps": 4},
    ),
}


@dataclass
class Gsm8kOptions(RecipeOptions):
    """The options of `lowmem-grpo run gsm8k`."""

    dataset: str = "openai/gsm8k"
    """A name on the hub, or a jsonl or parquet file with the columns `question` and `answer`."""


OPTIONS = Gsm8kOptions


def make_dataset(source: str = "openai/gsm8k", split: str = "train") -> Dataset:
    """Chat prompts and labels of GSM8K rows (columns `question` and `answer`): a split of the hub's dataset, or all of
    a local file."""
    path = Path(source)
    kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
    if path.suffix in kinds:
        if not path.is_file():
            raise OSError(f"no file {source!r}; dataset takes a jsonl or parquet file, or a name on the hub")
        wanted: dict[str, Any] = {"path": kinds[path.suffix], "data_files": str(path)}
    else:
        wanted = {"path": source, "name": "main"}
    try:
        rows = load_dataset(**wanted, split="train" if "data_files" in wanted else split)
    except (OSError, DatasetsError, StopIteration) as error:  # datasets gives the last one for a file without rows
        why = error.__cause__ or error
        raise OSError(f"no rows from {source!r}: {str(why) or 'it is empty'}") from error
    missing = sorted({"question", "answer"} - set(rows.column_names))
    if missing:
        raise ValueError(f"{source} has no column {' and '.join(missing)}; it has {', '.join(rows.column_names)}")
    return rows.map(
        lambda row: {
            "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": row["question"]}],
            "answer": extract_hash_answer(row["answer"]),
        }
    )


def held_out(size: int, seed: int, source: str | None) -> Dataset:
    """At most `size` rows that the recipe does not train on, in a seeded order: of the hub's test split, or a file."""
    rows = make_dataset(source or "openai/gsm8k", "test").shuffle(seed)
    return rows.select(range(min(size, len(rows))))


EXAM = Exam(held_out, correctness_reward_func, max_tokens=640, takes_source=True)


def run(options: Gsm8kOptions) -> None:
    """Load, train, report."""
    setup = prepare(options, DEFAULTS, PRESETS)
    weights = "4-bit" if setup.load_in_4bit else "16-bit"
    note = f"gsm8k: {setup.model}, {weights} weights, context {setup.max_seq_length}"
    teach(setup, Lesson("gsm8k", make_dataset(options.dataset), REWARDS, note=note))
