"""The objective of a learner, a class per algorithm: which rollouts and tokens count, and the loss of a micro-batch.
`PolicyOutputs` is what the loss may ask the policy for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.types import LossOutput, MicroBatch, Rollout, RolloutGroup, TokenField

ROUNDING = 1e-5  # log-probabilities in float32 that differ by less are the same


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
    units: int = 0  # of sequences that share a micro-batch; without any, as many as there are sequences


@dataclass
class PolicyOutputs:
    """Computes what a loss asks for, at a micro-batch's N trained tokens. The head runs when the first of
    log-probabilities, entropy and hits is asked for, once for all three, and never if none is."""

    hidden: Tensor  # (N, D) the last hidden states, in the head's dtype
    targets: Tensor  # (N,) int64
    at_head: Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor, Tensor]]  # `Policy.at_head`
    logits_of: Callable[[Tensor, Tensor, Tensor], Tensor]  # the logits (E,) of tokens (E,) at rows (E,) of `hidden`
    temperature: float = 1.0
    scores: tuple[Tensor, Tensor, Tensor] | None = None  # (N,) each, once the head has run: see `at_head`

    def scored(self, entropy_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        if self.scores is None:
            self.scores = self.at_head(self.hidden, self.targets, self.temperature, entropy_grad)
        return self.scores

    @property
    def logprobs(self) -> Tensor:
        """The log-probabilities (N,) of the targets."""
        return self.scored()[0]

    def entropy(self, grad: bool = False) -> Tensor:
        """Return the entropy (N,); with `grad` it has a gradient, and is to be asked for before all else."""
        entropy = self.scored(grad)[1]
        if grad and self.hidden.requires_grad and not entropy.requires_grad:
            raise RuntimeError("entropy(grad=True) comes too late: the head has run, and kept nothing for it. "
                               "Ask for it before logprobs, hits, several and entropy()")
        return entropy

    @property
    def hits(self) -> Tensor:
        """A tensor (N,) with 1 where the target is the policy's likeliest token, else 0."""
        logprobs, _, best = self.scored()
        return (logprobs.detach() >= best - ROUNDING).to(best.dtype)

    def several(self, places: Tensor, tokens: Tensor) -> Tensor:
        """Return log p (E,) of `tokens` (E,) int64 at `places` (E,) int64, indices into the N trained tokens:

            log p(k) = log p(0) + z(k) - z(0)        0: the target at the place; z: logits / temperature
        """
        everywhere = torch.arange(len(self.targets), device=self.targets.device)
        base = self.logprobs - self.logits_of(self.hidden, everywhere, self.targets) / self.temperature
        return base[places] + self.logits_of(self.hidden, places, tokens) / self.temperature


class Objective:
    """An algorithm, as the learner sees it. This base class needs no extra fields and counts every rollout."""

    @property
    def counts_generation(self) -> bool:
        """Whether means are over the tokens of a whole generation, not of one optimizer step."""
        return False

    @property
    def temperature(self) -> float:
        """The temperature that divides the logits: the sampler's, so that log-probabilities can be compared."""
        return 1.0

    def needed_before(self, optimizer_steps: int) -> tuple[TokenField, ...]:
        """Return the fields to compute before `optimizer_steps` steps: rows of TOKEN_FIELDS, or altered copies."""
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

    def loss(self, batch: MicroBatch, outputs: PolicyOutputs, totals: StepTotals) -> LossOutput:
        """Return this micro-batch's share of the step's loss. What it does not ask `outputs` for is not computed."""
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

    def stepped(self, step: int) -> None:
        """Receive that optimizer step number `step` was made."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""


def policy_tokens(rollout: Rollout) -> int:
    """Return the number of tokens whose policy term counts."""
    return rollout.num_trained if rollout.policy_mask is None else int(rollout.policy_mask.sum())
