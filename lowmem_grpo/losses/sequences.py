"""Sums and means of aligned tokens (N,) over the S sequences that `sequence_ids` (N,) numbers, and the trained tokens
of a rollout: an episode has context between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowmem_grpo.utils import torch

if TYPE_CHECKING:
    from torch import Tensor

    from lowmem_grpo.types import Rollout


def sequence_lengths(sequence_ids: Tensor, count: int | None = None) -> Tensor:
    """Return the tokens of each sequence, (S,) int64. `count` is S; without it the call syncs with the card."""
    if count is None:
        return torch.bincount(sequence_ids)
    return sequence_ids.new_zeros(count).index_add(0, sequence_ids, torch.ones_like(sequence_ids))


def sequence_sums(values: Tensor, sequence_ids: Tensor, count: int) -> Tensor:
    """Return the sum of `values` (N,) over each of `count` sequences, (S,); differentiable."""
    return values.new_zeros(count).index_add(0, sequence_ids, values)


def sequence_means(values: Tensor, sequence_ids: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean of `values` (N,) over each sequence, (S,); 0 for a sequence without tokens."""
    return sequence_sums(values, sequence_ids, len(lengths)) / lengths.clamp(min=1)


def of_trained(rollout: Rollout, values: Tensor) -> Tensor:
    """Return values (C,) of a rollout at its trained tokens, (N,)."""
    return values if rollout.trained is None else values[torch.tensor(rollout.trained, dtype=torch.bool)]


def with_context(rollout: Rollout, values: Tensor) -> Tensor:
    """Return (C,) from values (N,) at a rollout's trained tokens, with 0 at the others."""
    if rollout.trained is None:
        return values
    whole = values.new_zeros(len(rollout.trained))
    return whole.masked_scatter(torch.tensor(rollout.trained, dtype=torch.bool), values)
