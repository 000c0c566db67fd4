"""Trainers whose runs preflight looks at, and its findings as lines."""

from pathlib import Path
from typing import Any

import trainer_runs
from trainer_runs import digit_sum

from lowmem_grpo import GRPOTrainer

ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": f"Start with {n}. Add 4. What is the result?"}], "answer": str(n + 4)}
    for n in range(3, 15)
]
TEXTS = [{"prompt": f"Start with {n}. Add 4. What is the result?\n", "answer": str(n + 4)} for n in range(3, 15)]
WITH_SYSTEM = [{"prompt": [{"role": "system", "content": "Be brief."}, *row["prompt"]]} for row in ROWS]


def reads_answer(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    return digit_sum(completions)


def nothing_right(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def make(folder: Path, dataset: Any = ROWS, reward: Any = digit_sum, model: Any = None, evaluation: Any = None,
         **settings: Any) -> GRPOTrainer:
    """A trainer whose run goes into folder/run."""
    return trainer_runs.make(folder / "run", reward, dataset, model, eval_dataset=evaluation, **settings)


def found(trainer: Any, severity: str | None = None) -> list[str]:
    """Findings as lines; notes only where they are asked for."""
    return [str(one) for one in trainer.preflight()
            if (one.severity != "note" if severity is None else one.severity == severity)]
