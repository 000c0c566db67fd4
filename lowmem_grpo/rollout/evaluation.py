"""Rewards on a dataset that is not trained on, sampled as in training."""

from typing import Any

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.data.prompts import DataError, Prompt, PromptEncoder, check_dataset
from lowmem_grpo.rollout.metrics import rollout_metrics
from lowmem_grpo.rollout.sampler import Sampler
from lowmem_grpo.rollout.scoring import Scoring
from lowmem_grpo.types import RolloutGroup


class Evaluation:
    """An evaluation dataset; a bad one is refused here, before training starts."""

    def __init__(
        self, dataset: Any, config: GRPOConfig, encoder: PromptEncoder, sampler: Sampler, scoring: Scoring
    ) -> None:
        if dataset is not None:
            check_dataset(dataset)
        elif config.eval_strategy != "no":
            raise ValueError(f'eval_strategy is "{config.eval_strategy}", which needs an eval_dataset; pass one')
        self.dataset, self.config, self.encoder = dataset, config, encoder
        self.sampler, self.scoring = sampler, scoring

    def run(self) -> dict[str, float]:
        """Mean rewards and lengths of the current policy, under names that begin with eval_."""
        params = self.config.sampling(self.config.seed, n=self.config.num_generations_eval or 1)
        encoded = [self.encoder.encode(row) for row in self.dataset]
        prompts = [prompt for prompt in encoded if isinstance(prompt, Prompt)]
        if not prompts:
            raise DataError(f"no row of the evaluation dataset can be used; the first one: {encoded[0]}")
        size = self.config.per_device_eval_batch_size
        groups: list[RolloutGroup] = []
        with self.scoring.begin(prompts) as calls:
            for start in range(0, len(prompts), size):
                groups += self.sampler.sample(prompts[start : start + size], params)
            scores = calls.settle(groups)
        self.scoring.apply(groups, scores)
        return {f"eval_{name}": value for name, value in rollout_metrics(groups, self.scoring.names).items()}
