"""Answers to held-out problems before and after training: how many are right, and some of them side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from datasets import Dataset

from lowmem_grpo import GRPOConfig, SamplingParams
from lowmem_grpo.fast_model import FastPeftModel, LoraRequest

SHOWN = 6  # samples in the report


@dataclass(frozen=True)
class Answers:
    """One sample to each held-out problem, and the share of them that is right."""

    accuracy: float
    texts: list[str]

    def share(self, holds: Callable[[str], bool]) -> float:
        """The share of answers of which that is so."""
        return sum(map(holds, self.texts)) / len(self.texts)


def measure(
    model: FastPeftModel, dataset: Dataset, adapter: LoraRequest | None, config: GRPOConfig,
    right: Callable[..., Sequence[float | None]],
) -> Answers:
    """Answers at temperature 1, with an adapter or with the base model.

    `right` is called as a reward function is, with the completions and the dataset's columns by name, and pays more
    than 0 for a right answer.
    """
    params = SamplingParams(temperature=1.0, max_tokens=config.max_completion_length, seed=config.seed)
    texts = [output.outputs[0].text for output in model.fast_generate(list(dataset["prompt"]), params, adapter)]
    columns = {name: list(dataset[name]) for name in dataset.column_names if name != "prompt"}
    scores = right(completions=texts, **columns)
    return Answers(sum((score or 0.0) > 0 for score in scores) / len(scores), texts)


def side_by_side(dataset: Dataset, before: list[str], after: list[str]) -> list[dict[str, str]]:
    """The first few problems with their answer, and the samples before and after."""
    return [
        {"prompt": row["prompt"][-1]["content"], "answer": row["answer"], "before": old, "after": new}
        for row, old, new in zip(dataset.select(range(min(SHOWN, len(dataset)))), before, after, strict=False)
    ]
