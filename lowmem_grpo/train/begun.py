"""The part of a step's gradient that is there before all of the step's groups are."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowmem_grpo.losses.objective import Objective, StepTotals
from lowmem_grpo.train.sums import Sums
from lowmem_grpo.types import RolloutGroup


@dataclass
class Begun:
    """What was trained early, and under which conditions. The loss was divided by `totals`, some of which were guessed,
    because nobody knows how many tokens a step has before all of them are sampled."""

    totals: StepTotals
    sums: Sums
    conditions: tuple[Any, ...] = ()  # of the objective
    advantages: dict[int, list[Any]] = field(default_factory=dict)  # by the id of a group's first rollout

    @classmethod
    def nothing(cls, device: torch.device) -> "Begun":
        """Nothing was trained early."""
        return cls(StepTotals(0, 0, 0), Sums(device))

    def take_in(self, group: RolloutGroup) -> None:
        """A group's gradient is about to be added."""
        self.advantages[id(group.rollouts[0])] = told_of(group)

    def holds(self, group: RolloutGroup) -> bool:
        """Whether the group was trained early. Of a group only the rollouts with gradient may be given."""
        return any(id(rollout) in self.rollouts for rollout in group.rollouts)

    @property
    def rollouts(self) -> set[int]:
        """The ids of all rollouts of the groups."""
        return {each for told in self.advantages.values() for each, *_ in told}

    def agrees(self, groups: list[RolloutGroup], conditions: tuple[Any, ...]) -> bool:
        """Whether what is known now, with all groups sampled, is what the groups were trained with."""
        now = {id(group.rollouts[0]): told_of(group) for group in groups}
        return conditions == self.conditions and all(now.get(key) == told for key, told in self.advantages.items())

    @torch.no_grad()
    def divide_by(self, totals: StepTotals, objective: Objective, parameters: Sequence[nn.Parameter]) -> None:
        """Divide the loss and the gradient by the totals of the whole step, in which both are linear."""
        factor = objective.rescaled(self.totals, totals) if self.sums.count else 1.0
        if factor != 1.0:
            self.sums.scale(factor)
            for gradient in (p.grad for p in parameters if p.grad is not None):
                gradient.mul_(factor)
        self.totals = totals


def told_of(group: RolloutGroup) -> list[Any]:
    """What a group's gradient depends on beside tokens, of each rollout; it begins with the rollout's id."""
    return [(id(rollout), group.unjudged, rollout.advantage, tuple(rollout.invalid_rewards)) for rollout in
            group.rollouts]
