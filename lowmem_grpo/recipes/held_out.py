"""Answers to held-out problems before and after training: how many are right, and some of them side by side."""

from collections.abc import Callable
from typing import Any

from datasets import Dataset

from lowmem_grpo import GRPOConfig, SamplingParams
from lowmem_grpo.model import FastPeftModel, LoraRequest

SHOWN = 6  # samples in the report


def measure(
    model: FastPeftModel, dataset: Dataset, adapter: LoraRequest | None, config: GRPOConfig,
    right: Callable[..., list[float]],
) -> tuple[float, list[str]]:
    """Share of problems right at temperature 1, one sample each, and the samples.

    `right` is called as a reward function is: with the completions, and the dataset's columns by name.
    """
    params = SamplingParams(temperature=1.0, max_tokens=config.max_completion_length, seed=config.seed)
    texts = [output.outputs[0].text for output in model.fast_generate(list(dataset["prompt"]), params, adapter)]
    columns = {name: list(dataset[name]) for name in dataset.column_names if name != "prompt"}
    scores = right(texts, **columns)
    return sum(scores) / len(scores), texts


def side_by_side(dataset: Dataset, before: list[str], after: list[str]) -> list[dict[str, str]]:
    """The first few problems with their answer, and the samples before and after."""
    return [
        {"prompt": row["prompt"][-1]["content"], "answer": row["answer"], "before": old, "after": new}
        for row, old, new in zip(dataset.select(range(min(SHOWN, len(dataset)))), before, after, strict=False)
    ]


def text_of(completion: Any) -> str:
    """The text of a completion, chat or plain."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
