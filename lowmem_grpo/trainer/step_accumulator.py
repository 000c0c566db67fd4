"""What the micro-batches of an optimizer step add up to, beside the gradient; and the part that was trained early."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_grpo.losses.objective import Objective, Reducer, StepTotals
from lowmem_grpo.trainer.nonfinite import Flags
from lowmem_grpo.types import LossOutput, MicroBatch, Rollout, RolloutGroup


class StepAccumulator:
    """The loss so far, its metrics, what was not finite, and the number of micro-batches."""

    def __init__(self, device: torch.device) -> None:
        self.reducer, self.flags, self.count = Reducer(), Flags(), 0
        self.totals: dict[str, Tensor] = {"loss": torch.zeros((), device=device)}

    def add(self, batch: MicroBatch, out: LossOutput) -> None:
        """Take in a micro-batch whose gradient was added."""
        self.totals["loss"] = self.totals["loss"] + out.loss.detach()
        if out.policy_loss is not None:
            self.totals["policy_loss"] = self.totals.get("policy_loss", 0) + out.policy_loss
        self.reducer.add(out.metrics, len(batch.trained), out.counts)
        self.reducer.keep(out.samples)
        self.count += 1

    def copied(self) -> "StepAccumulator":
        """The same sums, to which more can be added without a change of these. Tensors are never changed in place."""
        copied = copy.copy(self)
        copied.totals, copied.flags, copied.reducer = dict(self.totals), Flags(), Reducer()
        copied.flags.rollouts, copied.flags.tables = list(self.flags.rollouts), list(self.flags.tables)
        copied.reducer.sums, copied.reducer.weights = dict(self.reducer.sums), dict(self.reducer.weights)
        copied.reducer.samples = {name: list(values) for name, values in self.reducer.samples.items()}
        return copied

    def sent(self, rollouts: list[Rollout]) -> dict[str, Any]:
        """Return what `together` needs of one rank, on the host; bad rollouts by their places in all `rollouts`."""
        places = {id(rollout): place for place, rollout in enumerate(rollouts)}
        return {"totals": {name: total.cpu() for name, total in self.totals.items()}, "count": self.count,
                "sums": {name: value.cpu() for name, value in self.reducer.sums.items()},
                "weights": self.reducer.weights,
                "samples": {name: [part.cpu() for part in parts] for name, parts in self.reducer.samples.items()},
                "bad": [(places[id(rollout)], what) for rollout, what in self.flags.read()]}

    @classmethod
    def together(cls, sent: list[dict[str, Any]], rollouts: list[Rollout]) -> "StepAccumulator":
        """The sums of all ranks, which are the same in each of them."""
        made = cls(torch.device("cpu"))
        for part in sent:
            for name, total in part["totals"].items():
                made.totals[name] = made.totals.get(name, torch.zeros(())) + total
            made.reducer.join(part["sums"], part["weights"], part["samples"])
            made.flags.known += [(rollouts[place], what) for place, what in part["bad"]]
            made.count += part["count"]
        return made

    def metrics(self, objective: Objective) -> dict[str, float]:
        losses = {name: total.item() for name, total in self.totals.items()}
        return objective.measured(self.reducer) | losses | {"micro_batches": float(self.count)}


@dataclass
class PartialGradient:
    """The part of a step's gradient that was trained early, and under which conditions. The loss was divided by
    `totals`, some of which were guessed, because nobody knows how many tokens a step has before all are sampled."""

    totals: StepTotals
    sums: StepAccumulator
    conditions: tuple[Any, ...]  # the objective's own
    groups: dict[int, list[Any]] = field(default_factory=dict)  # `facts_of` them, by the id of their first rollout

    @property
    def rollouts(self) -> set[int]:
        return {each for facts in self.groups.values() for each, *_ in facts}

    def holds(self, group: RolloutGroup) -> bool:
        """Return whether the group was trained early. Of a group only the rollouts with gradient may be given."""
        return any(id(rollout) in self.rollouts for rollout in group.rollouts)

    def agrees(self, groups: list[RolloutGroup], conditions: tuple[Any, ...]) -> bool:
        """Return whether what is known now, with all groups sampled, is what the groups were trained with."""
        now = {id(group.rollouts[0]): facts_of(group) for group in groups}
        return conditions == self.conditions and all(now.get(key) == facts for key, facts in self.groups.items())

    @torch.no_grad()
    def divide_by(self, totals: StepTotals, objective: Objective, parameters: Sequence[nn.Parameter]) -> None:
        """Divide the loss and the gradient by the totals of the whole step, in which both are linear."""
        factor = objective.rescaled(self.totals, totals) if self.sums.count else 1.0
        if factor != 1.0:
            self.sums.totals = {name: total * factor for name, total in self.sums.totals.items()}
            for gradient in (p.grad for p in parameters if p.grad is not None):
                gradient.mul_(factor)


def facts_of(group: RolloutGroup) -> list[Any]:
    """Return what a group's gradient depends on beside tokens, of each rollout; it begins with the rollout's id."""
    return [(id(rollout), group.unjudged, rollout.advantage, tuple(rollout.invalid_rewards))
            for rollout in group.rollouts]
