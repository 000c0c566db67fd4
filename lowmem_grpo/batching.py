"""Packing: completions of a step, without padding, into micro-batches of whole sequences."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lowmem_grpo.types import MicroBatch, Rollout, RolloutGroup

Sequence = tuple[RolloutGroup, Rollout]


def pack(
    groups: Iterable[RolloutGroup], max_tokens: int | None = None, max_sequences: int | None = None
) -> list[MicroBatch]:
    """Pack every completion with its prompt, longest first, into micro-batches.

    A micro-batch holds at most `max_tokens` tokens and `max_sequences` sequences; a sequence longer than `max_tokens`
    runs alone. Sorting by length keeps sequences of one micro-batch alike, which padded attention kernels like.
    """
    sequences = [(group, rollout) for group in groups for rollout in group.rollouts if rollout.completion_ids]
    sequences.sort(key=sequence_length, reverse=True)
    batches: list[list[Sequence]] = []
    room = 0.0
    for sequence in sequences:
        length = sequence_length(sequence)
        if not batches or length > room or len(batches[-1]) == max_sequences:
            batches.append([])
            room = max_tokens or float("inf")
        batches[-1].append(sequence)
        room -= length
    return [collate(batch) for batch in batches]


def sequence_length(sequence: Sequence) -> int:
    """Places that prompt and completion take: one less than their tokens, since the last is a target only."""
    group, rollout = sequence
    return len(group.prompt_ids) + len(rollout.completion_ids) - 1


def collate(sequences: list[Sequence]) -> MicroBatch:
    """The packed tensors of some sequences, in their order."""
    lengths = [sequence_length(sequence) for sequence in sequences]
    tokens = [torch.tensor(group.prompt_ids + rollout.completion_ids) for group, rollout in sequences]
    starts = [len(group.prompt_ids) - 1 for group, _ in sequences]  # the place that predicts the first completion token
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu_seqlens[1:] = torch.tensor(lengths).cumsum(0)

    def aligned(values: Callable[[Rollout], Tensor]) -> Tensor:
        out = torch.zeros(sum(lengths))
        for (_, rollout), start, begin, end in zip(sequences, starts, cu_seqlens[:-1], cu_seqlens[1:], strict=True):
            out[begin + start : end] = values(rollout)
        return out

    rollouts = [rollout for _, rollout in sequences]
    old, ref = all_or_none(rollouts, "old_logprobs"), all_or_none(rollouts, "ref_logprobs")
    return MicroBatch(
        input_ids=torch.cat([ids[:-1] for ids in tokens]),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        targets=torch.cat([ids[1:] for ids in tokens]),
        cu_seqlens=cu_seqlens,
        max_seqlen=max(lengths),
        loss_mask=aligned(lambda rollout: torch.ones(())).bool(),
        sequence_ids=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        advantages=aligned(lambda rollout: torch.tensor(rollout.advantage)),
        rollout_logprobs=aligned(lambda rollout: torch.tensor(rollout.rollout_logprobs)),
        old_logprobs=aligned(lambda rollout: required(rollout.old_logprobs)) if old else None,
        ref_logprobs=aligned(lambda rollout: required(rollout.ref_logprobs)) if ref else None,
        rollouts=tuple(rollouts),
    )


def all_or_none(rollouts: list[Rollout], name: str) -> bool:
    """Whether the rollouts have the field; ValueError where only some have it."""
    present = [getattr(rollout, name) is not None for rollout in rollouts]
    if any(present) and not all(present):
        raise ValueError(f"{sum(present)} of {len(present)} rollouts have {name}; give it to all of them, or to none")
    return all(present)


def required(values: Tensor | None) -> Tensor:
    """`values`, known to be there."""
    assert values is not None
    return values


def unpack(values: Tensor, loss_mask: Tensor, sequence_ids: Tensor) -> list[Tensor]:
    """Per-sequence completion values of `values` (N,), which lie at the True places of `loss_mask` (T,)."""
    counts = torch.bincount(sequence_ids[loss_mask], minlength=int(sequence_ids[-1]) + 1)
    return list(values.split(counts.tolist()))
