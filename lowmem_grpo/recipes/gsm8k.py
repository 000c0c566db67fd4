"""Recipe `gsm8k`: grade-school maths with the five classic reward functions, and a preset for each card size."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError
from rich.console import Console

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.recipes.exam import Exam
from lowmem_grpo.recipes.options import RecipeOptions
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
# By card size in GiB: (model, context, LoRA rank, settings). "cpu" is the embedded model, for a look at the loop.
PRESETS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "cpu": ("tiny", 1536, 16, {"max_completion_length": 64, "max_steps": 3, "optim": "adamw_torch"}),
    "16": ("Qwen/Qwen2.5-1.5B-Instruct", 1024, 32, {"max_completion_length": 640, "optim": "paged_adamw_8bit"}),
    "24": ("Qwen/Qwen2.5-3B-Instruct", 1536, 32, {"max_completion_length": 1024, "optim": "paged_adamw_8bit"}),
    "48": ("Qwen/Qwen2.5-7B-Instruct", 2048, 32, {"max_completion_length": 1536, "optim": "paged_adamw_8bit"}),
    "80": (
        "meta-llama/Llama-3.1-8B-Instruct", 4096, 64,
        {"max_completion_length": 3072, "optim": "adamw_8bit", "gradient_accumulation_steps": 4},
    ),
}


@dataclass
class Gsm8kOptions(RecipeOptions):
    """The options of `lowmem-grpo run gsm8k`; what the preset sets can be set by name too."""

    gpu: str = "auto"
    """Card size in GiB: 16, 24, 48 or 80; "cpu"; or "auto", the largest preset that this machine's card holds."""
    dataset: str = "openai/gsm8k"
    model: str = "preset"
    max_seq_length: int = 0
    lora_rank: int = 0


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


def preset(options: Gsm8kOptions) -> tuple[str, int, int, dict[str, Any]]:
    """The preset for `gpu`; ValueError names those there are."""
    size = card_size() if options.gpu == "auto" else re.sub(r"(?i)\s*gi?b$", "", options.gpu)
    if size not in PRESETS:
        raise ValueError(f"gpu is {options.gpu!r}; allowed are auto, {', '.join(PRESETS)}")
    return PRESETS[size]


def card_size() -> str:
    """The largest preset that fits this machine's card, "cpu" without one."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    sizes = [size for size in ("16", "24", "48", "80") if gib >= 0.9 * int(size)]
    if not sizes:
        raise ValueError(f"this card has {gib:.1f} GiB; the smallest preset is for 16 (choose one with gpu=...)")
    return sizes[-1]


def run(options: Gsm8kOptions) -> None:
    """Load, train, report."""
    console = Console()
    name, context, rank, settings = preset(options)
    name = name if options.model == "preset" else options.model
    config = GRPOConfig(**(DEFAULTS | settings | options.config))
    four_bit = name != "tiny" if options.load_in_4bit is None else options.load_in_4bit
    context = options.max_seq_length or context
    console.print(f"gsm8k: {name}, {'4-bit' if four_bit else '16-bit'} weights, context {context}")
    bare, tokenizer = FastLanguageModel.from_pretrained(
        name, max_seq_length=context, load_in_4bit=four_bit, fast_inference=options.fast_inference,
    )
    model = FastLanguageModel.get_peft_model(
        bare, r=options.lora_rank or rank, lora_alpha=options.lora_rank or rank, random_state=config.seed,
        use_gradient_checkpointing=options.checkpointing,
    )
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=REWARDS, args=config,
        train_dataset=make_dataset(options.dataset),
    )
    result = trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.finish({"recipe": "gsm8k"})
    if not result.finished:
        console.print("stopped before the end; the same command with resume=true goes on")
    console.print(f"{result.global_step} steps in {trainer.state.elapsed:.0f} s; report: {trainer.run_dir}/report.html")
