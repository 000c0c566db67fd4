"""The packed sequences of a completion: one, or several of an episode whose history was rewritten.

A sequence ends with the last token that the policy drew; others in it lie there untrained. One with a prompt of its own
shares the places of the whole prompt where others of its group have the same, else of the group's prompt where its own
begins with that.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem_grpo.memory.cutting import Lengths
from lowmem_grpo.models.routes import Routes, routes_of
from lowmem_grpo.types import Rollout, RolloutGroup, Split

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Sequence:
    """One packed sequence: a shared prompt, the rest of its own prompt, and tokens of a rollout."""

    rollout: Rollout
    start: int  # its first token, among the C of the rollout
    end: int
    prompt: list[int]  # whose places it shares with the sequences of its family
    lead: list[int]  # what is left of its own prompt
    family: Ids | None = None  # None: the prompt is the group's
    routes: Routes | None = None  # its first tokens' routes, prompt included

    @property
    def ids(self) -> list[int]:
        """The tokens after the shared prompt."""
        return [*self.lead, *self.rollout.completion_ids[self.start : self.end]]

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.family, len(self.prompt), len(self.lead) + self.end - self.start)

    @property
    def drawn(self) -> list[bool]:
        """Whether the policy drew each of its tokens of the rollout."""
        trained = self.rollout.trained
        return [True] * (self.end - self.start) if trained is None else trained[self.start : self.end]

    @property
    def mask(self) -> Tensor:
        if self.rollout.trained is None and not self.lead:
            return torch.full((self.end - self.start,), True)
        return torch.tensor([*[False] * len(self.lead), *self.drawn])

    @property
    def trained(self) -> Tensor:
        """int64: the indices of its trained tokens, among the C of the rollout."""
        return self.start + torch.tensor(self.drawn).nonzero()[:, 0]

    def values(self, field: str) -> Tensor:
        """A field of the rollout, (C,) or one number, at each of `ids`, float32; 0 at the lead."""
        value = torch.as_tensor(getattr(self.rollout, field), dtype=torch.float32)
        if value.ndim == 0:
            return value.expand(len(self.lead) + self.end - self.start)
        own = value[self.start : self.end]
        return torch.cat([own.new_zeros(len(self.lead)), own]) if self.lead else own


def sequences_of(group: RolloutGroup, rollouts: list[Rollout]) -> list[list[Sequence]]:
    """The sequences of each of these rollouts of a group; of one without trained tokens there are none."""
    own = Counter(tuple(split.prompt_ids) for other in group.rollouts for split in other.splits if split.prompt_ids)
    repeated = {ids for ids, count in own.items() if count > 1}
    return [[part for part in cut_at_splits(group, rollout, repeated) if part.end > part.start]
            for rollout in rollouts]


def cut_at_splits(group: RolloutGroup, rollout: Rollout, repeated: set[Ids]) -> list[Sequence]:
    """The sequences of a rollout, each up to its last trained token; where it has none, it is empty."""
    splits, count = [Split(0), *rollout.splits], len(rollout.completion_ids)
    sequences = []
    ends = [*(later.start for later in rollout.splits), count]
    for split, end, routes in zip(splits, ends, routes_of(rollout, group.prompt_ids), strict=True):
        while rollout.trained and end > split.start and not rollout.trained[end - 1]:
            end -= 1
        parts = shared(split.prompt_ids, group.prompt_ids, repeated)
        sequences.append(Sequence(rollout, split.start, end, *parts, routes))
    return sequences


def shared(prompt: list[int] | None, of_group: list[int], repeated: set[Ids]) -> tuple[list[int], list[int],
           Ids | None]:
    """Return the shared part of a sequence's prompt, what is left, and the family it shares with."""
    if prompt is None or prompt == of_group:
        return of_group, [], None
    if tuple(prompt) not in repeated and prompt[: len(of_group)] == of_group:
        return of_group, prompt[len(of_group) :], None
    return prompt, [], tuple(prompt)
