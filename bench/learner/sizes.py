"""Sizes of the learner of bench/learner/bench.py, the puzzles it is taught, and the folder that it is kept in."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PUZZLES = {"min_numbers": 3, "max_numbers": 3, "largest_number": 20, "largest_target": 99}
LESSON = "lesson.json"


@dataclass(frozen=True)
class Size:
    """A model, how it is taught, and what its recipes differ in; head_dim is 64, and every matrix is made of whole NF4
    blocks."""

    shape: dict[str, int]
    batch: int
    steps: int
    learning_rate: float
    recipe: dict[str, int | float]


def shape(hidden: int, layers: int, kv_heads: int, vocabulary: int) -> dict[str, int]:
    """Sizes of a Qwen2 with an MLP of three times the hidden size."""
    return {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers, "num_attention_heads": hidden // 64, "num_key_value_heads": kv_heads}


SIZES = {
    "tiny": Size(  # goes through everything and learns nothing
        shape(128, 2, 1, 384), batch=8, steps=4, learning_rate=2e-3,
        recipe={"max_steps": 2, "learning_rate": 1e-3, "per_device_train_batch_size": 8, "train_size": 16,
                "gradient_accumulation_steps": 1, "num_generations": 4, "eval_problems": 8, "lora_rank": 8},
    ),
    "small": Size(  # what a CPU can teach in minutes
        shape(128, 4, 1, 512), batch=64, steps=4000, learning_rate=3e-3,
        recipe={"max_steps": 20, "learning_rate": 3e-3, "per_device_train_batch_size": 64, "train_size": 4096,
                "gradient_accumulation_steps": 2, "num_generations": 8, "eval_problems": 256, "lora_rank": 16},
    ),
    "full": Size(
        shape(512, 8, 4, 512), batch=256, steps=20_000, learning_rate=1e-3,
        recipe={"max_steps": 40, "learning_rate": 1e-3, "per_device_train_batch_size": 64, "train_size": 4096,
                "gradient_accumulation_steps": 4, "num_generations": 8, "eval_problems": 1024, "lora_rank": 16},
    ),
}


def settings(size: str, seconds: float, seed: int) -> dict[str, Any]:
    """What a model was made with; another one has other settings."""
    taught = {name: value for name, value in asdict(SIZES[size]).items() if name != "recipe"}
    return {"size": size, **taught, "puzzles": PUZZLES, "seconds": seconds, "seed": seed}


def read_lesson(folder: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """What the training of a folder's model gave; None where there is no model with these settings."""
    path = folder / LESSON
    lesson = json.loads(path.read_text()) if path.is_file() else {}
    return lesson if lesson.get("settings") == wanted else None
