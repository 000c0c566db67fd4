"""The objective of a learner, a class per algorithm: which rollouts and tokens count, and the loss of a micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.types import LossOutput, MicroBatch, Rollout, RolloutGroup


class Reducer:
    """Weighted means over micro-batches; for names that end in min or max, the extremes."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.weights: dict[str, float] = {}
        self.samples: dict[str, list[Tensor]] = {}

    def add(self, metrics: dict[str, Tensor], weight: float, counts: dict[str, float] | None = None) -> None:
        """Add a micro-batch's metrics: means over `weight` items, unless `counts` has another number for the name."""
        for name, value in metrics.items():
            share = 1.0 if name.endswith(("min", "max")) else (counts or {}).get(name, weight)
            self.add_value(name, value * share if share else torch.zeros_like(value), share)  # a mean of nothing is NaN

    def add_value(self, name: str, value: Tensor, weight: float) -> None:
        """Add a sum over `weight` items; or, if the name ends in min or max, an extreme."""
        seen = self.sums.get(name)
        if name.endswith(("min", "max")):
            extreme = torch.minimum if name.endswith("min") else torch.maximum
            self.sums[name], self.weights[name] = value if seen is None else extreme(seen, value), 1.0
        else:
            self.sums[name] = value if seen is None else seen + value
            self.weights[name] = self.weights.get(name, 0.0) + weight

    def join(self, sums: dict[str, Tensor], weights: dict[str, float], samples: dict[str, list[Tensor]]) -> None:
        for name, value in sums.items():
            self.add_value(name, value, weights[name])
        for name, parts in samples.items():
            self.samples.setdefault(name, []).extend(parts)

    def keep(self, samples: dict[str, Tensor]) -> None:
        """Keep values (N,) that are needed for the whole step."""
        for name, values in samples.items():
            self.samples.setdefault(name, []).append(values)

    def sampled(self, name: str) -> Tensor:
        """Return all values of this name, (N,)."""
        return torch.cat(self.samples.get(name) or [torch.empty(0)])

    def result(self) -> dict[str, float]:
        return {name: (total / max(self.weights[name], 1e-12)).item() for name, total in self.sums.items()}


@dataclass(frozen=True)
class StepTotals:
    """The counts over all groups of one optimizer step: the denominators of the step's means."""

    sequences: int
    tokens: float  # tokens that count in the loss
    policy_tokens: float  # those among them whose policy term counts


class Objective:
    """An algorithm, as the learner sees it. This base class needs no extra fields and counts every rollout."""

    counts_hits = False  # True: log the share of trained tokens that are the policy's likeliest

    @property
    def counts_generation(self) -> bool:
        """Whether means are over the tokens of a whole generation, not of one optimizer step."""
        return False

    @property
    def temperature(self) -> float:
        """The temperature that divides the logits: the sampler's, so that log-probabilities can be compared."""
        return 1.0

    @property
    def entropy_grad(self) -> bool:
        return False

    def needed_before(self, optimizer_steps: int) -> tuple[str, ...]:
        """Return the fields (old_logprobs, ref_logprobs, entropy) that rollouts need before `optimizer_steps` steps."""
        return ()

    def start_update(self, rollouts: list[Rollout], policy_version: int) -> None:
        """Receive all rollouts of an update that begins, and the version of its policy."""

    def prepared(self, rollouts: list[Rollout], groups: Sequence[RolloutGroup] = ()) -> None:
        """Receive an update's rollouts, with the fields of `needed_before`, and the groups that hold them."""

    def counted(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Return the rollouts whose tokens count in the step's means."""
        return rollouts

    def with_gradient(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Return the rollouts that can change the policy. The others need no forward pass."""
        return rollouts

    def loss(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor, totals: StepTotals) -> LossOutput:
        """Return this micro-batch's share of the step's loss; logprobs and entropy (N,) are for its trained tokens."""
        raise NotImplementedError

    @property
    def conditions(self) -> tuple[Any, ...]:
        """The decisions of `start_update`, and everything else that changes the loss between updates."""
        return ()

    def rescaled(self, before: StepTotals, after: StepTotals) -> float:
        """Return the factor that turns a loss divided by the totals `before` into one divided by `after`."""
        return 1.0

    def measured(self, reducer: Reducer) -> dict[str, float]:
        """Return the metrics of the whole step, from its means and from the samples that `loss` returned."""
        return reducer.result()

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""


def policy_tokens(rollout: Rollout) -> int:
    """Return the number of tokens whose policy term counts."""
    return rollout.num_trained if rollout.policy_mask is None else int(rollout.policy_mask.sum())
