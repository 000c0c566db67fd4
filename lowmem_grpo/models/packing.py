"""Packing: the completions of a step as micro-batches of whole sequences, without padding and with each prompt once.

The completions of one prompt share its places: a group of G takes P - 1 + G C places instead of G (P - 1 + C). The
shared part ends before the prompt's last token: that token predicts the first one of each completion, so each
completion begins with it. Attention finds a sequence's tokens through `sources`, and so needs no mask.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem_grpo.memory.cutting import SPREAD, Limits, cut
from lowmem_grpo.types import MicroBatch, Rollout, RolloutGroup

Sequence = tuple[RolloutGroup, Rollout]


def pack(
    groups: Iterable[RolloutGroup], max_tokens: int | None = None, max_sequences: int | None = None,
    spread: float = SPREAD,
) -> list[MicroBatch]:
    """Pack every completion, group by group, longest first, into micro-batches.

    A micro-batch holds at most `max_tokens` places and `max_sequences` sequences; a sequence longer than `max_tokens`
    gets one to itself. Attention lays sequences side by side, each with its prompt and as wide as the longest, which
    may take at most `spread` times `max_tokens`. `cutting.cut` has the rule.
    """
    given = list(groups)
    lengths = [(len(group.prompt_ids), [len(one.completion_ids) for one in group.rollouts]) for group in given]
    batches = cut(lengths, Limits(max_tokens, max_sequences, spread))
    return [collate([(given[one.group], given[one.group].rollouts[one.rollout]) for one in batch]) for batch in batches]


def sequence_length(sequence: Sequence) -> int:
    """Tokens of prompt and completion except the last, which is only a target."""
    group, rollout = sequence
    return len(group.prompt_ids) + len(rollout.completion_ids) - 1


@dataclass(frozen=True)
class Piece:
    """Neighbouring places of a pack: a prompt up to its last token, or that token and a completion up to its last."""

    sequence: int  # the first sequence that it belongs to
    position: int  # of its first token
    ids: list[int]
    targets: list[int]
    rollout: Rollout | None  # None for a prompt

    def values(self, field: str) -> Tensor:
        """A rollout's field over the piece's places; zeros for a prompt."""
        value = getattr(self.rollout, field) if self.rollout else 0.0
        return torch.as_tensor(value, dtype=torch.float32).expand(len(self.ids))


def pieces(sequences: list[Sequence]) -> Iterator[Piece]:
    """Each prompt once for the neighbouring completions that share it, and each completion."""
    current = None
    for number, (group, rollout) in enumerate(sequences):
        prompt, completion = group.prompt_ids, rollout.completion_ids
        if group is not current:
            current = group
            yield Piece(number, 0, prompt[:-1], prompt[1:], None)
        yield Piece(number, len(prompt) - 1, [prompt[-1], *completion[:-1]], completion, rollout)


def collate(sequences: list[Sequence]) -> MicroBatch:
    """The packed tensors of some sequences, in their order. Neighbours of one group share their prompt."""
    packed = list(pieces(sequences))
    prompts = prompt_lengths(packed)
    rollouts = [rollout for _, rollout in sequences]
    lengths = torch.tensor([sequence_length(sequence) for sequence in sequences])
    width = int(lengths.max())
    position_ids = torch.cat([torch.arange(p.position, p.position + len(p.ids)) for p in packed])
    sequence_ids = torch.cat([torch.full((len(p.ids),), p.sequence) for p in packed])
    loss_mask = torch.cat([torch.full((len(p.ids),), p.rollout is not None) for p in packed])

    def aligned(field: str) -> Tensor:
        return torch.cat([piece.values(field) for piece in packed])

    input_ids = torch.tensor([token for piece in packed for token in piece.ids])
    return MicroBatch(
        input_ids=input_ids, host_ids=input_ids,
        position_ids=position_ids,
        targets=torch.tensor([token for piece in packed for token in piece.targets]),
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int(),
        max_seqlen=width,
        sources=find_sources(packed, width),
        places=sequence_ids * width + position_ids,
        copies=count_copies(prompts),
        prompts=tuple(prompts),
        loss_mask=loss_mask,
        trained=loss_mask.nonzero()[:, 0],
        sequence_ids=sequence_ids,
        advantages=aligned("advantages"),
        rollout_logprobs=aligned("rollout_logprobs"),
        old_logprobs=aligned("old_logprobs") if all_or_none(rollouts, "old_logprobs") else None,
        ref_logprobs=aligned("ref_logprobs") if all_or_none(rollouts, "ref_logprobs") else None,
        policy_mask=aligned("policy_mask").bool() if all_or_none(rollouts, "policy_mask") else None,
        rollouts=tuple(rollouts),
    )


def find_sources(packed: list[Piece], width: int) -> Tensor:
    """(S * width,): the place of each sequence's tokens, in order; right of its end, any place of the sequence."""
    rows: list[Tensor] = []
    start, prompt = 0, torch.empty(0, dtype=torch.long)
    for piece in packed:
        own = torch.arange(start, start + len(piece.ids))
        start += len(piece.ids)
        if piece.rollout is None:
            prompt = own
        else:
            filler = own[:1].expand(width - len(prompt) - len(own))
            rows.append(torch.cat([prompt, own, filler]))
    return torch.cat(rows)


def prompt_lengths(packed: list[Piece]) -> list[tuple[int, ...]]:
    """For each prompt, the number of its own places and of those of each completion."""
    found: list[list[int]] = []
    for piece in packed:
        if piece.rollout is None:
            found.append([])
        found[-1].append(len(piece.ids))
    return [tuple(lengths) for lengths in found]


def count_copies(prompts: list[tuple[int, ...]]) -> Tensor:
    """(T,): how many sequences share each place; all completions of a prompt share its own places."""
    counts = [count for own, *others in prompts for count in (len(others), *[1] * len(others))]
    return torch.tensor(counts).repeat_interleave(torch.tensor([length for lengths in prompts for length in lengths]))


def all_or_none(rollouts: list[Rollout], name: str) -> bool:
    """Whether the rollouts have the field; ValueError where only some of them do."""
    present = [getattr(rollout, name) is not None for rollout in rollouts]
    if any(present) and not all(present):
        raise ValueError(f"{sum(present)} of {len(present)} rollouts have {name}; give it to all of them, or to none")
    return all(present)


def unpack(values: Tensor, loss_mask: Tensor, sequence_ids: Tensor) -> list[Tensor]:
    """Per-sequence completion values of `values` (N,), which lie at the True places of `loss_mask` (T,)."""
    counts = torch.bincount(sequence_ids[loss_mask], minlength=int(sequence_ids[-1]) + 1)
    return list(values.split(counts.tolist()))
