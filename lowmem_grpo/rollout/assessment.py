"""How many answers a model gets right on a set of prompts: sampled, scored and counted."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data import stream
from lowmem_grpo.data.prompts import check_dataset
from lowmem_grpo.rewards.calling.reward_batch import score_groups
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rewards.verifier import Verifier
from lowmem_grpo.runs.accuracy import Answers
from lowmem_grpo.types import Rollout, RolloutGroup

logger = logging.getLogger(__name__)
TOGETHER = 256  # completions that are sampled at a time
Right = Callable[..., Sequence[float | None]] | Verifier


def answer(
    model: Any, rows: list[dict[str, Any]], functions: list[Right], params: SamplingParams, adapter: Any = None,
    together: int = TOGETHER,
) -> Answers:
    """Sample `params.n` answers to each row, about `together` at a time. The first function pays more than 0 for a
    right one; the values of the others are averaged."""
    prompts = [row["prompt"] for row in rows]
    outputs = [output for part, seed in parts(prompts, params, together) for output in
               model.fast_generate(part, seeded(params, seed), adapter)]
    completions = [completion for output in outputs for completion in output.outputs]
    each = (row for row in rows for _ in range(params.n))
    verdicts, metrics = judge(functions, [RolloutGroup(row, [], [Rollout(
        list(completion.token_ids), [], completion.finish_reason, completion.text,
    )]) for row, completion in zip(each, completions, strict=True)])
    texts = [completion.text for completion in completions]
    return Answers(in_rows(texts, params.n), in_rows([bool(verdict) for verdict in verdicts], params.n),
                   verdicts.count(None), sum(len(completion.token_ids) for completion in completions),
                   sum(completion.finish_reason == "length" for completion in completions), metrics)


def parts(prompts: list[Any], params: SamplingParams, together: int) -> Iterator[tuple[list[Any], int]]:
    """Prompts that are sampled together, with a different number for each part."""
    size = max(1, together // params.n)
    return ((prompts[start : start + size], start) for start in range(0, len(prompts), size))


def seeded(params: SamplingParams, number: int) -> SamplingParams:
    return SamplingParams(**(vars(params) | {"seed": None if params.seed is None else params.seed + number}))


def in_rows(values: list[Any], width: int) -> list[list[Any]]:
    return [values[start : start + width] for start in range(0, len(values), width)]


def judge(
    functions: list[Right], groups: list[RolloutGroup], episodes: bool = False
) -> tuple[list[bool | None], dict[str, float]]:
    """(N,) verdicts of the first function on the rollouts of groups, None if it has no opinion, and the means of the
    others."""
    rewards = [function.reward() if isinstance(function, Verifier) else function for function in functions]
    scorer = RewardScorer(rewards, episodes=episodes)
    scores = score_groups(scorer, groups, None)
    first, *others = scorer.names
    verdicts = [None if value is None else value > 0 for value in scores.rewards[first]]
    return verdicts, {name: mean(scores.rewards[name]) for name in others}


def mean(values: list[float | None]) -> float:
    """The mean of the values that are not None; NaN if there are none."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else float("nan")


def rows_of(dataset: Any, limit: int | None) -> list[dict[str, Any]]:
    """The first `limit` rows, without those with an empty prompt, which a warning counts; ValueError without any."""
    check_dataset(dataset)
    dataset = stream.rows_of(dataset)
    rows = [dataset[index] for index in range(min(len(dataset), limit or len(dataset)))]
    usable = [row for row in rows if row["prompt"]]
    if not usable:
        raise ValueError("no row has a prompt")
    if len(usable) < len(rows):
        logger.warning("%d of %d rows have an empty prompt and are left out", len(rows) - len(usable), len(rows))
    return usable
