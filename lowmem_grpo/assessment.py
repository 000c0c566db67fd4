"""What a model gets right on a set of prompts, and what its adapter changes: sampled, scored, counted."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.accuracy import accuracy_interval, paired_difference, pass_at_k
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data import check_dataset
from lowmem_grpo.rewards import RewardScorer
from lowmem_grpo.rewards.verifier import Verifier
from lowmem_grpo.scoring import score_rows

logger = logging.getLogger(__name__)

TOGETHER = 256  # completions that are sampled at a time
Right = Callable[..., list[float | None]] | Verifier


@dataclass
class Answers:
    """n answers to each of P prompts."""

    texts: list[list[str]]  # (P, n)
    right: list[list[bool]]  # (P, n)
    unjudged: int  # answers that could not be judged; they count as wrong
    tokens: int
    cut_off: int  # answers that ended at max_tokens
    metrics: dict[str, float]  # mean of each further reward function

    @property
    def counts(self) -> list[int]:
        """Right answers of each prompt (P,)."""
        return [sum(row) for row in self.right]


def answer(
    model: Any, rows: list[dict[str, Any]], functions: list[Right], params: SamplingParams, adapter: Any = None
) -> Answers:
    """Sample `params.n` answers to each row's prompt, by the base model or with an adapter. The first function says
    what is right: a verifier, or a reward function that pays more than 0; the others are averaged."""
    prompts = [row["prompt"] for row in rows]
    outputs = [output for part, seed in parts(prompts, params) for output in
               model.fast_generate(part, seeded(params, seed), adapter)]
    completions = [completion for output in outputs for completion in output.outputs]
    each = [row for row in rows for _ in range(params.n)]
    verdicts, metrics = judge(functions, each, completions)
    texts = [completion.text for completion in completions]
    return Answers(
        in_rows(texts, params.n), in_rows([bool(verdict) for verdict in verdicts], params.n), verdicts.count(None),
        sum(len(completion.token_ids) for completion in completions),
        sum(completion.finish_reason == "length" for completion in completions), metrics,
    )


def parts(prompts: list[Any], params: SamplingParams) -> Iterator[tuple[list[Any], int]]:
    """Prompts that are sampled together, with a number that is another for each part."""
    size = max(1, TOGETHER // params.n)
    return ((prompts[start : start + size], start) for start in range(0, len(prompts), size))


def seeded(params: SamplingParams, number: int) -> SamplingParams:
    """The same settings with a seed of their own."""
    return SamplingParams(**(vars(params) | {"seed": None if params.seed is None else params.seed + number}))


def in_rows(values: list[Any], width: int) -> list[list[Any]]:
    """Consecutive runs of `width` values; the last one may be shorter."""
    return [values[start : start + width] for start in range(0, len(values), width)]


def judge(
    functions: list[Right], rows: list[dict[str, Any]], completions: list[Any]
) -> tuple[list[bool | None], dict[str, float]]:
    """(N,) verdicts by the first function, None where it has no opinion, and the means of the others."""
    rewards = [function.reward() if isinstance(function, Verifier) else function for function in functions]
    scorer = RewardScorer(rewards)
    ids = [list(completion.token_ids) for completion in completions]
    scores = score_rows(scorer, rows, [completion.text for completion in completions], ids, None)
    first, *others = scorer.names
    verdicts = [None if value is None else value > 0 for value in scores.rewards[first]]
    return verdicts, {name: mean(scores.rewards[name]) for name in others}


def mean(values: list[float | None]) -> float:
    """Of what is there; NaN of nothing."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else float("nan")


def rows_of(dataset: Any, limit: int | None) -> list[dict[str, Any]]:
    """Those of the first `limit` rows that have a prompt; ValueError where none has one. How many lack it is said."""
    check_dataset(dataset)
    rows = [dict(dataset[index]) for index in range(min(len(dataset), limit or len(dataset)))]
    usable = [row for row in rows if row["prompt"]]
    if not usable:
        raise ValueError("no row has a prompt")
    if len(usable) < len(rows):
        logger.warning("%d of %d rows have an empty prompt and are left out", len(rows) - len(usable), len(rows))
    return usable


def described(answers: Answers, ks: list[int]) -> dict[str, Any]:
    """One model's numbers."""
    samples = len(answers.right[0])
    share, interval = accuracy_interval(answers.counts, samples)
    total = samples * len(answers.right)
    return {
        "accuracy": share, "interval": list(interval),
        "pass_at_k": {str(k): pass_at_k(answers.counts, samples, k) for k in ks},
        "mean_tokens": answers.tokens / total, "cut_off": answers.cut_off / total, "unjudged": answers.unjudged / total,
        **({"rewards": answers.metrics} if answers.metrics else {}),
    }


def compared(base: Answers, adapter: Answers) -> dict[str, Any]:
    """What the adapter changes on the same prompts."""
    samples = len(base.right[0])
    change, interval = paired_difference(base.counts, adapter.counts, samples)
    pairs = list(zip(base.counts, adapter.counts, strict=True))
    return {
        "accuracy": change, "interval": list(interval), "better": sum(new > old for old, new in pairs),
        "worse": sum(new < old for old, new in pairs), "same": sum(new == old for old, new in pairs),
    }


def answered_rows(rows: list[dict[str, Any]], found: dict[str, Answers]) -> list[dict[str, Any]]:
    """Every row with its answers, in plain values."""
    return [
        {name: value for name, value in row.items() if isinstance(value, str | int | float | list | bool | None)} | {
            model: [{"text": text, "right": right} for text, right in zip(
                answers.texts[index], answers.right[index], strict=True)]
            for model, answers in found.items()
        }
        for index, row in enumerate(rows)
    ]
