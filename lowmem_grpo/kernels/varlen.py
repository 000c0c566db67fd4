"""Sequences packed without padding, each cut into chunks of CHUNK tokens. Step j computes chunk j of every sequence
that has one. Within a step the longest sequences come first, so that those that go on are the first ones."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

CHUNK = 64  # tokens


@dataclass(frozen=True)
class Chunks:
    """N chunks of C tokens, in the order in which they are computed."""

    sources: Tensor  # (N * C,) int64, the packed token; past a run's end any token
    real: Tensor  # (N, C) bool, False for filler
    places: Tensor  # (T,) int64, index of each packed token into N * C
    counts: tuple[int, ...]  # for each step, the number of runs with a chunk in it
    order: Tensor  # (S,) int64, the runs, the longest first
    back: Tensor  # (S,) int64, the place of each run in `order`


@dataclass(eq=False)
class VarlenSequences:
    """S sequences of `lengths` tokens, one after the other; a length may be 0."""

    lengths: tuple[int, ...]
    device: torch.device

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def filled(self) -> "VarlenSequences":
        """The sequences with at least one token."""
        return VarlenSequences(tuple(length for length in self.lengths if length), self.device)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """(S + 1,) int64, cumulative lengths, on the device."""
        return torch.tensor([0, *self.lengths]).cumsum(0).to(self.device)

    @cached_property
    def chunks(self) -> Chunks:
        numbers = [-(-length // CHUNK) for length in self.lengths]
        order = sorted(range(len(numbers)), key=lambda run: -numbers[run])
        counts = [sum(number > step for number in numbers) for step in range(max(numbers, default=0))]
        bounds = [0, *accumulate(self.lengths)]
        cut = [(order[place], step) for step, count in enumerate(counts) for place in range(count)]
        starts = torch.tensor([bounds[run] + CHUNK * step for run, step in cut], dtype=torch.long)[:, None]
        ends = torch.tensor([bounds[run + 1] for run, _ in cut], dtype=torch.long)[:, None]
        token = starts + torch.arange(CHUNK)
        real = token < ends
        sources = torch.where(real, token, starts).flatten()
        number = {chunk: place for place, chunk in enumerate(cut)}
        packed = [(number[run, step] * CHUNK, min(CHUNK, length - CHUNK * step))
                  for run, length in enumerate(self.lengths) for step in range(numbers[run])]
        places = torch.cat([torch.arange(place, place + count) for place, count in packed])
        runs = torch.tensor(order, dtype=torch.long).to(self.device)
        return Chunks(sources.to(self.device), real.to(self.device), places.to(self.device), tuple(counts), runs,
                      runs.argsort())
