"""Rewards on a dataset that is not trained on, sampled as in training."""

from collections.abc import Callable
from typing import Any

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import DataError, Prompt, PromptEncoder
from lowmem_grpo.rollout.metrics import rollout_metrics
from lowmem_grpo.rollout.sampler import Sampler
from lowmem_grpo.rollout.scoring import Scoring
from lowmem_grpo.types import RolloutGroup

Part = tuple[list[RolloutGroup], dict[str, float]]  # groups, and what functions logged of them


class Evaluation:
    """Evaluates on rows, sampled with `params` in batches of `size` prompts."""

    def __init__(
        self, ranks: Any, dataset: Any, params: SamplingParams, size: int, encoder: PromptEncoder, sampler: Sampler,
        scoring: Scoring,
    ) -> None:
        """Each of `ranks` (see trainer/distributed.py) does some batches. `dataset` has all rows, for the checks."""
        self.ranks, self.dataset, self.params, self.size, self.encoder = ranks, dataset, params, size, encoder
        self.sampler, self.scoring = sampler, scoring

    def run(self, rows: Any, measure: Callable[[list[RolloutGroup]], dict[str, float]]) -> dict[str, float]:
        """Return rewards, lengths and logged metrics on these rows with what `measure` says; DataError without rows."""
        encoded = [self.encoder.encode(rows[index]) for index in range(len(rows))]
        prompts = [prompt for prompt in encoded if isinstance(prompt, Prompt)]
        if not prompts:
            raise DataError(f"no row of the evaluation dataset can be used; the first one: {encoded[0]}")
        batches = [prompts[start : start + self.size] for start in range(0, len(prompts), self.size)]
        mine = [batches[place] for place in self.ranks.place.share(len(batches))]
        parts: list[Part] = self.ranks.gather("the evaluation", self.groups_of(mine))
        groups = [group for sampled, _ in parts for group in sampled]
        return measure(groups) | rollout_metrics(groups, self.scoring.names) | over_completions(parts)

    def groups_of(self, batches: list[list[Prompt]]) -> Part:
        """Return the groups of all batches, with rewards, and the means of what functions logged of them."""
        groups: list[RolloutGroup] = []
        if not batches:
            return groups, {}
        with self.scoring.start_batch([prompt for batch in batches for prompt in batch]) as calls:
            for batch in batches:
                groups += self.sampler.sample(batch, self.params)
            scores = calls.settle(groups)
        self.scoring.apply(groups, scores)
        return groups, means_of(scores.extras) | scores.metrics


def means_of(extras: dict[str, list[Any]]) -> dict[str, float]:
    """Return the mean of each column that holds numbers only, None aside."""
    known = {name: [value for value in values if value is not None] for name, values in extras.items()}
    return {name: sum(values) / len(values) for name, values in known.items()
            if values and all(isinstance(value, (int, float)) for value in values)}


def over_completions(parts: list[Part]) -> dict[str, float]:
    """Return the mean of each metric that functions logged, over the completions of the parts in which they did."""
    logs: dict[str, list[tuple[float, int]]] = {}
    for groups, logged in parts:
        size = sum(len(group.rollouts) for group in groups)
        for name, value in logged.items():
            logs.setdefault(name, []).append((value, size))
    return {name: sum(value * size for value, size in pairs) / sum(size for _, size in pairs)
            for name, pairs in logs.items()}
