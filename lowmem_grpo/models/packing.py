"""Pack the completions of a step into micro-batches of whole sequences, without padding and with each prompt once.

The completions of one prompt share its packed tokens: a group of G takes P - 1 + G C tokens instead of G (P - 1 + C).
The shared part ends before the prompt's last token: that token predicts the first one of each completion, so each
completion begins with it. Attention finds a sequence's tokens through `sources`.

A completion is one sequence, or several for an episode whose history was rewritten. A sequence ends with the last token
that the policy sampled; earlier tokens from other sources are packed but not trained. If several sequences of a group
have the same prompt, they share all of it. Other sequences share the group's prompt if theirs begins with it.

If memory runs out, `Packer` starts again with smaller micro-batches. The gradient is that of a run with these from the
start: bit for bit on the CPU, up to rounding on a GPU.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowmem_grpo.memory.cutting import SPREAD, CutLimits, Lengths, Span, cut_spans
from lowmem_grpo.memory.oom import BatchLimit, OutOfMemory, catch_oom, smaller
from lowmem_grpo.models.routes import Routes, packed_routes, routes_of
from lowmem_grpo.types import TOKEN_FIELDS, ImageToken, MicroBatch, Rollout, RolloutGroup, Split, TokenField

Ids = tuple[int, ...]
Completion = tuple[RolloutGroup, Rollout]


@dataclass(frozen=True)
class Sequence:
    """One packed sequence: a shared prompt, the rest of its own prompt, and tokens of a rollout."""

    rollout: Rollout
    start: int  # index of its first token among the rollout's C
    end: int  # index after its last one
    prompt: list[int]  # packed once for all sequences of its family
    lead: list[int]  # the rest of its own prompt
    family: Ids | None = None  # the shared prompt; None: the group's
    routes: Routes | None = None  # for its first tokens, prompt included

    @property
    def ids(self) -> list[int]:
        """The tokens after the shared prompt."""
        return [*self.lead, *self.rollout.completion_ids[self.start : self.end]]

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.family, len(self.prompt), len(self.lead) + self.end - self.start)

    @property
    def drawn(self) -> list[bool]:
        """One flag per token from the rollout: true if the policy sampled it."""
        trained = self.rollout.trained
        return [True] * (self.end - self.start) if trained is None else trained[self.start : self.end]

    @property
    def mask(self) -> Tensor:
        """The mask (len(ids),) bool of those `ids` that the policy sampled."""
        if self.rollout.trained is None and not self.lead:
            return torch.full((self.end - self.start,), True)
        return torch.tensor([*[False] * len(self.lead), *self.drawn])

    @property
    def trained(self) -> Tensor:
        """The indices (int64) of the sequence's trained tokens among the rollout's C tokens."""
        return self.start + torch.tensor(self.drawn).nonzero()[:, 0]

    def values(self, field: TokenField) -> Tensor:
        """Return the rollout's field at each of `ids`. A field (C, ...) is 0 at tokens of the prompt."""
        value = torch.as_tensor(field.of(self.rollout), dtype=field.torch_dtype)
        if value.ndim == 0:
            return value.expand(len(self.lead) + self.end - self.start)
        own = value[self.start : self.end]
        return torch.cat([own.new_zeros(len(self.lead), *own.shape[1:]), own]) if self.lead else own


def sequences_of(group: RolloutGroup, rollouts: list[Rollout]) -> list[list[Sequence]]:
    """Return the sequences of each of these rollouts of a group; a rollout without trained tokens has none."""
    own = Counter(tuple(split.prompt_ids) for other in group.rollouts for split in other.splits if split.prompt_ids)
    repeated = {ids for ids, count in own.items() if count > 1}
    return [[part for part in cut_at_splits(group, rollout, repeated) if part.end > part.start]
            for rollout in rollouts]


def cut_at_splits(group: RolloutGroup, rollout: Rollout, repeated: set[Ids]) -> list[Sequence]:
    """Return the sequences of a rollout, each up to its last trained token, and empty without one."""
    splits, sequences = [Split(0), *rollout.splits], []
    ends = [*(later.start for later in rollout.splits), len(rollout.completion_ids)]
    routed = routes_of(rollout, group.prompt_ids) if rollout.has_routes else [None] * len(splits)
    for split, end, routes in zip(splits, ends, routed, strict=True):
        while rollout.trained and end > split.start and not rollout.trained[end - 1]:
            end -= 1
        parts = shared(split.prompt_ids, group.prompt_ids, repeated)
        sequences.append(Sequence(rollout, split.start, end, *parts, routes))
    return sequences


def shared(prompt: list[int] | None, of_group: list[int],
           repeated: set[Ids]) -> tuple[list[int], list[int], Ids | None]:
    """Return a sequence's shared prompt, the rest of its prompt, and the shared one's key (None: the group's)."""
    if prompt is None or prompt == of_group:
        return of_group, [], None
    if tuple(prompt) not in repeated and prompt[: len(of_group)] == of_group:
        return of_group, prompt[len(of_group) :], None
    return prompt, [], tuple(prompt)


def pack(groups: Iterable[RolloutGroup], max_tokens: int | None = None, max_sequences: int | None = None,
         spread: float = SPREAD) -> list[MicroBatch]:
    """Pack every completion, group by group, longest first, into micro-batches. A micro-batch has at most `max_tokens`
    packed tokens, `max_sequences` completions, and `spread * max_tokens` tokens with those that attention pads or
    copies. A unit of completions above a limit gets its own micro-batch."""
    whole = list(groups)
    spans = [
        [Span(number, place, tuple(sequence.lengths for sequence in sequences), group.rollouts[place].unit)
         for place, sequences in enumerate(sequences_of(group, group.rollouts))]
        for number, group in enumerate(whole)
    ]
    batches = cut_spans(spans, CutLimits(max_tokens, max_sequences, spread))
    return [collate([(whole[span.group], whole[span.group].rollouts[span.rollout]) for span in batch])
            for batch in batches]


@dataclass(frozen=True)
class Piece:
    """A contiguous part of a pack: a prompt without its last token, or that last token followed by a sequence."""

    row: int  # index of the sequence, or of the first one that shares the prompt
    rollout: int  # index of its rollout in the pack
    offset: int  # index of its first token in the sequence
    ids: list[int]
    targets: list[int]
    sequence: Sequence | None  # None for a prompt
    routes: Routes | None = None  # the sequence's, or for a prompt those of its first sequence that has any
    trained: bool = False  # of a prompt: whether its targets are trained

    @property
    def mask(self) -> Tensor:
        return self.sequence.mask if self.sequence else torch.full((len(self.ids),), self.trained)


def pieces(completions: list[Completion]) -> Iterator[Piece]:
    """Yield each prompt once, followed by the sequences of those neighbouring completions of a group that share it."""
    row = first = 0
    for _, neighbours in groupby(completions, key=lambda completion: id(completion[0])):
        same = list(neighbours)
        families: dict[object, list[tuple[int, Sequence]]] = {}
        for number, sequences in enumerate(sequences_of(same[0][0], [rollout for _, rollout in same]), first):
            for sequence in sequences:
                families.setdefault(sequence.family, []).append((number, sequence))
        for members in families.values():
            prompt = members[0][1].prompt
            known = next((sequence.routes for _, sequence in members if sequence.routes is not None), None)
            trained = any(own.rollout.trains_prompt for _, own in members)
            yield Piece(row, members[0][0], 0, prompt[:-1], prompt[1:], None, known, trained)
            for number, own in members:
                yield Piece(row, number, len(prompt) - 1, [prompt[-1], *own.ids[:-1]], own.ids, own, own.routes)
                row += 1
        first += len(same)


def collate(completions: list[Completion]) -> MicroBatch:
    """Return the packed micro-batch of completions, in their order. Neighbours of one group share their prompt."""
    packed = list(pieces(completions))
    prompts = prompt_lengths(packed)
    rollouts = [rollout for _, rollout in completions]
    lengths = torch.tensor([piece.offset + len(piece.ids) for piece in packed if piece.sequence])
    width = int(lengths.max())
    sizes = torch.tensor([len(piece.ids) for piece in packed])
    offsets = torch.cat([torch.arange(p.offset, p.offset + len(p.ids)) for p in packed])
    rows = torch.tensor([piece.row for piece in packed]).repeat_interleave(sizes)
    loss_mask = torch.cat([piece.mask for piece in packed])
    ids = [token for piece in packed for token in piece.ids]
    input_ids = torch.tensor(ids)
    routes = routed = None
    if any(piece.routes is not None for piece in packed):
        routes, routed = packed_routes([(piece.routes, piece.offset, len(piece.ids)) for piece in packed])
    return MicroBatch(
        input_ids=input_ids, host_ids=input_ids, offsets=offsets,
        targets=torch.tensor([token for piece in packed for token in piece.targets]),
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int(),
        max_seqlen=width,
        sources=find_sources(packed, width),
        places=rows * width + offsets,
        copies=count_copies(prompts),
        prompts=tuple(prompts),
        images={place: token for place, token in enumerate(ids) if isinstance(token, ImageToken)},
        loss_mask=loss_mask,
        trained=loss_mask.nonzero()[:, 0],
        sequence_ids=torch.tensor([piece.rollout for piece in packed]).repeat_interleave(sizes),
        fields={name: aligned(packed, row) for name, row in TOKEN_FIELDS.items()
                if row.packed and all_or_none(rollouts, row)},
        units=torch.tensor(number_units(completions)),
        rollouts=tuple(rollouts),
        homes=find_homes(packed, rollouts),
        routes=routes, routed=routed,
    )


def aligned(packed: list[Piece], field: TokenField) -> Tensor:
    """Return a field's values (T, ...) at the packed tokens; 0 at those of a prompt."""
    own = [piece.sequence.values(field) if piece.sequence else None for piece in packed]
    zero = next(torch.zeros_like(values[:1]) for values in own if values is not None)
    return torch.cat([zero.expand(len(piece.ids), *zero.shape[1:]) if values is None else values
                      for piece, values in zip(packed, own, strict=True)])


def find_sources(packed: list[Piece], width: int) -> Tensor:
    """Return the packed indices of each sequence's tokens in order, (S * width,); padding repeats one of them."""
    rows: list[Tensor] = []
    start, prompt = 0, torch.empty(0, dtype=torch.long)
    for piece in packed:
        own = torch.arange(start, start + len(piece.ids))
        start += len(piece.ids)
        if piece.sequence is None:
            prompt = own
        else:
            filler = own[:1].expand(width - len(prompt) - len(own))
            rows.append(torch.cat([prompt, own, filler]))
    return torch.cat(rows)


def find_homes(packed: list[Piece], rollouts: list[Rollout]) -> Tensor | None:
    """Return each trained token's index (N,) among all completions' tokens; None if all are trained, none split."""
    if all(rollout.trained is None and not rollout.splits for rollout in rollouts):
        return None
    starts = [0, *torch.tensor([len(rollout.completion_ids) for rollout in rollouts]).cumsum(0).tolist()]
    return torch.cat([starts[piece.rollout] + piece.sequence.trained for piece in packed if piece.sequence])


def prompt_lengths(packed: list[Piece]) -> list[tuple[int, ...]]:
    """Return, for each prompt, its number of packed tokens, then that of each sequence that shares the prompt."""
    families: list[list[int]] = []
    for piece in packed:
        if piece.sequence is None:
            families.append([])
        families[-1].append(len(piece.ids))
    return [tuple(lengths) for lengths in families]


def count_copies(prompts: list[tuple[int, ...]]) -> Tensor:
    """Return the number of sequences that share each packed token, (T,)."""
    counts = [count for own, *others in prompts for count in (len(others), *[1] * len(others))]
    return torch.tensor(counts).repeat_interleave(torch.tensor([length for lengths in prompts for length in lengths]))


def all_or_none(rollouts: list[Rollout], field: TokenField) -> bool:
    """Return whether the rollouts have the field; ValueError if only some of them do."""
    present = [field.of(rollout) is not None for rollout in rollouts]
    if any(present) and not all(present):
        raise ValueError(f"{sum(present)} of {len(present)} rollouts have {field.name}; give it to all, or to none")
    return all(present)


def number_units(completions: Iterable[Completion]) -> list[int]:
    """Return the unit of each completion, numbered from 0."""
    numbers: dict[tuple[Any, ...], int] = {}
    return [numbers.setdefault((id(group), rollout.unit, rollout.unit is None and id(rollout)), len(numbers))
            for group, rollout in completions]


def unpack(values: Tensor, batch: MicroBatch) -> list[Tensor]:
    """Split values (N, ...) of all trained tokens, on the host, by rollout: (C, ...) each, with 0 at other tokens."""
    sizes = [len(rollout.completion_ids) for rollout in batch.rollouts]
    if batch.homes is not None:
        values = values.new_zeros(sum(sizes), *values.shape[1:]).index_copy(0, batch.homes, values)
    return list(values.split(sizes))


T = TypeVar("T")


class Packer:
    """Packs groups for a device, within limits. If memory runs out, it lowers the limit on a micro-batch's tokens."""

    def __init__(self, device: torch.device, bound: BatchLimit) -> None:
        self.device, self.bound = device, bound
        self.size = 0  # tokens of the current micro-batch

    def run(self, what: str, groups: list[RolloutGroup], limits: CutLimits, work: Callable[[Iterator[MicroBatch]], T],
            undo: Callable[[], None] | None = None, again: Callable[[], None] | None = None) -> T:
        """Return the result of `work` for all micro-batches of the groups; `what` names the work in messages. If memory
        runs out, `undo` reverts the attempt, the limit is lowered, `again` prepares the next attempt, and everything is
        packed anew. MemoryExhaustedError if each micro-batch is already a single unit."""
        while True:
            tokens = self.bound.under(limits.tokens)
            batches = pack(groups, tokens, limits.sequences, limits.spread)
            done = catch_oom(partial(work, self.moved(batches)), self.device, undo)
            if not isinstance(done, OutOfMemory):
                return done
            divisible = [len(batch.input_ids) for batch in batches if batch.units.max()]
            self.bound.lower(f"{what} of {self.size:,} tokens", done, smaller(tokens or self.size, divisible))
            if again is not None:
                again()

    def moved(self, batches: list[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches on the device, and set `size` to the tokens of the current one."""
        for batch in batches:
            self.size = len(batch.input_ids)
            yield batch.to(self.device)
