"""Rewards on a dataset that is not trained on, sampled as in training."""

from typing import Any

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import DataError, Prompt, PromptEncoder, check_dataset
from lowmem_grpo.rollout.metrics import rollout_metrics
from lowmem_grpo.rollout.sampler import Sampler
from lowmem_grpo.rollout.scoring import Scoring
from lowmem_grpo.types import RolloutGroup

Part = tuple[list[RolloutGroup], dict[str, float]]  # groups, and what functions logged of them


class Evaluation:
    """An evaluation dataset, sampled with `params` in batches of `size` prompts; a bad one is refused here, before
    training starts. So is None, unless `strategy` is "no"."""

    def __init__(
        self, dataset: Any, strategy: str, params: SamplingParams, size: int, encoder: PromptEncoder, sampler: Sampler,
        scoring: Scoring,
    ) -> None:
        if dataset is not None:
            check_dataset(dataset)
        elif strategy != "no":
            raise ValueError(f'eval_strategy is "{strategy}", which needs an eval_dataset; pass one')
        self.dataset, self.params, self.size, self.encoder = dataset, params, size, encoder
        self.sampler, self.scoring = sampler, scoring

    def run(self, dataset: Any = None) -> dict[str, float]:
        """Return mean rewards and lengths of the current policy on these rows, or on its own, and what functions
        logged, named eval_*; ValueError where there are no rows."""
        rows = self.dataset if dataset is None else dataset
        if rows is None:
            raise ValueError("there is no eval_dataset; pass one to the trainer, or to evaluate(eval_dataset=...)")
        check_dataset(rows)
        encoded = [self.encoder.encode(rows[index]) for index in range(len(rows))]
        prompts = [prompt for prompt in encoded if isinstance(prompt, Prompt)]
        if not prompts:
            raise DataError(f"no row of the evaluation dataset can be used; the first one: {encoded[0]}")
        batches = [prompts[start : start + self.size] for start in range(0, len(prompts), self.size)]
        parts = self.parts(batches)
        metrics = rollout_metrics([group for groups, _ in parts for group in groups], self.scoring.names)
        return {f"eval_{name}": value for name, value in (metrics | over_completions(parts)).items()}

    def parts(self, batches: list[list[Prompt]]) -> list[Part]:
        """Return the groups of all batches, in the parts in which they were sampled."""
        return [self.groups_of(batches)]

    def groups_of(self, batches: list[list[Prompt]]) -> Part:
        """Return the groups of all batches, one batch sampled after the other, with rewards, and what functions logged
        of them; of columns given to `log_extra` the means of those that are numbers."""
        groups: list[RolloutGroup] = []
        if not batches:
            return groups, {}
        with self.scoring.begin([prompt for batch in batches for prompt in batch]) as calls:
            for batch in batches:
                groups += self.sampler.sample(batch, self.params)
            scores = calls.settle(groups)
        self.scoring.apply(groups, scores)
        return groups, means_of(scores.extras) | scores.metrics


def means_of(extras: dict[str, list[Any]]) -> dict[str, float]:
    """Return the mean of each column that holds numbers only, None aside."""
    given = {name: [value for value in values if value is not None] for name, values in extras.items()}
    return {name: sum(values) / len(values) for name, values in given.items()
            if values and all(isinstance(value, (int, float)) for value in values)}


def over_completions(parts: list[Part]) -> dict[str, float]:
    """Return the mean of each metric that functions logged, over the completions of the parts in which they did."""
    found: dict[str, list[tuple[float, int]]] = {}
    for groups, logged in parts:
        size = sum(len(group.rollouts) for group in groups)
        for name, value in logged.items():
            found.setdefault(name, []).append((value, size))
    return {name: sum(value * size for value, size in pairs) / sum(size for _, size in pairs)
            for name, pairs in found.items()}
