"""Rewards on a dataset that is not trained on, sampled as in training."""

from typing import Any

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import DataError, Prompt, PromptEncoder, check_dataset
from lowmem_grpo.rollout.metrics import rollout_metrics
from lowmem_grpo.rollout.sampler import Sampler
from lowmem_grpo.rollout.scoring import Scoring
from lowmem_grpo.types import RolloutGroup


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
        """Mean rewards and lengths of the current policy on these rows, or on its own, named eval_*; ValueError where
        there are none."""
        rows = self.dataset if dataset is None else dataset
        if rows is None:
            raise ValueError("there is no eval_dataset; pass one to the trainer, or to evaluate(eval_dataset=...)")
        check_dataset(rows)
        encoded = [self.encoder.encode(rows[index]) for index in range(len(rows))]
        prompts = [prompt for prompt in encoded if isinstance(prompt, Prompt)]
        if not prompts:
            raise DataError(f"no row of the evaluation dataset can be used; the first one: {encoded[0]}")
        groups: list[RolloutGroup] = []
        with self.scoring.begin(prompts) as calls:
            for start in range(0, len(prompts), self.size):
                groups += self.sampler.sample(prompts[start : start + self.size], self.params)
            scores = calls.settle(groups)
        self.scoring.apply(groups, scores)
        return {f"eval_{name}": value for name, value in rollout_metrics(groups, self.scoring.names).items()}
