"""Recipe `gsm8k`: grade-school maths with the five classic reward functions.

    lowmem-grpo run gsm8k                           # openai/gsm8k; model and settings fit the card, or gpu=24
    lowmem-grpo run gsm8k dataset=rows.jsonl        # your own rows: `question`, and `answer` that ends in `#### 42`

On a CPU the recipe uses the embedded tiny model, which cannot learn this task: three steps show that everything works.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from lowmem_grpo.data.files import cell_text, check_columns, read_rows
from lowmem_grpo.recipes.eval_task import Exam
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

logger = logging.getLogger(__name__)
HUB = "openai/gsm8k"  # read with its configuration `main`
REWARDS: list[Callable[..., Any]] = [
    xmlcount_reward_func, soft_format_reward_func, strict_format_reward_func, int_reward_func, correctness_reward_func,
]
COLUMNS = ("question", "answer")  # required in every row
DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/gsm8k", "seed": 3407, "learning_rate": 5e-6, "adam_beta2": 0.99, "weight_decay": 0.1,
    "warmup_ratio": 0.1, "lr_scheduler_type": "cosine", "max_grad_norm": 0.1, "max_steps": 250, "save_steps": 50,
}
PRESETS: Presets = {
    "cpu": Preset("tiny", 1536, 16, 16, {"max_completion_length": 64, "max_steps": 3, "optim": "adamw_torch"}),
    "8": Preset("Qwen/Qwen2.5-1.5B-Instruct", 1024, 32, 32,
                {"max_completion_length": 640, "optim": "paged_adamw_8bit"}),
    "16": Preset("Qwen/Qwen2.5-1.5B-Instruct", 1024, 32, 32,
                 {"max_completion_length": 640, "optim": "paged_adamw_8bit"}),
    "24": Preset("Qwen/Qwen2.5-3B-Instruct", 1536, 32, 32,
                 {"max_completion_length": 1024, "optim": "paged_adamw_8bit"}),
    "48": Preset("Qwen/Qwen2.5-7B-Instruct", 2048, 32, 32,
                 {"max_completion_length": 1536, "optim": "paged_adamw_8bit"}),
    "80": Preset("meta-llama/Llama-3.1-8B-Instruct", 4096, 64, 64,
                 {"max_completion_length": 3072, "optim": "adamw_8bit", "gradient_accumulation_steps": 4}),
}


@dataclass
class Gsm8kOptions(RecipeOptions):
    dataset: str = HUB
    """A hub dataset (OWNER/NAME or OWNER/NAME:CONFIG), or a jsonl, json, csv or parquet file. Each row has the columns
    `question` and `answer`. The label in `answer` comes after `####`."""


OPTIONS = Gsm8kOptions


def make_dataset(source: str = HUB, split: str = "train") -> Dataset:
    """Return rows with `prompt`, `question` and `answer`, from a split of a hub dataset or from a whole file. Rows
    without a question or label are left out, with a warning. ValueError if none is left."""
    rows = read_rows(f"{source}:main" if source == HUB else source, split)
    check_columns(source, rows.column_names, COLUMNS)
    made = [with_prompt(row) for row in rows]
    kept = [row for row in made if row["question"] and row["answer"]]
    lacking = f"{len(made) - len(kept)} of {len(made)} rows have no question, or no label after #### in their answer"
    if not kept:
        raise ValueError(f"{source}: {lacking}: write answers as `... #### 42`; for answers of another form, "
                         "lowmem-grpo new NAME --data FILE writes a recipe")
    if len(kept) < len(made):
        logger.warning("%s: %s, and are left out", source, lacking)
    return Dataset.from_list(kept)


def with_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its chat prompt, and its label as `answer`; a missing question or label is None."""
    question = cell_text(row["question"])
    return row | {"prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}],
                  "question": question, "answer": extract_hash_answer(cell_text(row["answer"]) or "") or None}


def held_out(size: int, seed: int, source: str | None) -> Dataset:
    """Return at most `size` rows in a seeded order, from the test split of a hub dataset or from a file."""
    rows = make_dataset(source or HUB, "test").shuffle(seed)
    return rows.select(range(min(size, len(rows))))


EXAM = Exam(held_out, correctness_reward_func, max_tokens=640, takes_source=True, of_options=lambda options, tiny: {
    "problems": lambda size, seed, source: held_out(size, seed, source or options.dataset)})


def run(options: Gsm8kOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    note = f"gsm8k: {setup.model}, {setup.weights} weights, context {setup.max_seq_length}"
    facts = {"dataset": setup.options["dataset"]}  # for the model's card
    teach(setup, Lesson("gsm8k", make_dataset(options.dataset), REWARDS, note=note, facts=facts))
