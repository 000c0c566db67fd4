"""Rows packed into sequences of `max_length` tokens, by TRL's three strategies; batch sizes then count packs, not rows.

    bfd         best fit, longest row first; rows longer than `max_length` are truncated
    bfd_split   as bfd, but the rest of a row that is too long becomes a row of its own
    wrapped     all tokens concatenated and cut every `max_length` tokens; a row attends to the rows before it

With `bfd` and `bfd_split`, the rows of a pack do not attend to each other.
"""

import logging
from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from sys import maxsize
from typing import Any

from lowmem_grpo.data.examples import ExampleEncoder, Examples, each_of
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.data.stream import Stream

logger = logging.getLogger(__name__)

STRATEGIES = ("bfd", "bfd_split", "wrapped")
Row = dict[str, Any]


@dataclass
class PackedRows:
    """Packs, accessed by index. A pack is {"rows": its rows}."""

    rows: Any
    packs: list[list[int]]  # row indices of each pack
    column_names = ("rows",)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Row:
        return {"rows": [self.rows[place] for place in self.packs[index]]}


@dataclass
class PackEncoder:
    """Encodes each row of a pack with `inner`; other attributes are those of `inner`."""

    inner: Any  # an ExampleEncoder
    column = "rows"

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):  # asked for by `copy`, before `inner` is set
            raise AttributeError(name)
        return getattr(self.inner, name)

    def encode(self, row: Row) -> Examples | str:
        results = [self.inner.encode(member) for member in row["rows"]]
        parts = [part for result in results for part in each_of(result)]
        return Examples(row, [], "", parts=parts) if parts else str(results[0])


def packed(rows: Any, encoder: ExampleEncoder, strategy: str, tokens: ExampleEncoder) -> tuple[Any, Any]:
    """Return packs of at most the encoder's `max_length` tokens, and the encoder for them. `tokens` is the encoder for
    rows of token ids. DataError for a stream, or if no row can be used."""
    if isinstance(rows, Stream):
        raise DataError("packing=True, and the rows are a stream, of which no length is known before it is read; leave "
                        "packing out (sequences are packed without padding anyway), or pass a datasets.Dataset")
    size = encoder.max_prompt_length
    if strategy == "bfd":
        lengths = [min(size, sum(len(part.input_ids) for part in each_of(result)))
                   for result in encoded(rows, encoder)]
        return PackedRows(rows, best_fit(lengths, size)), PackEncoder(encoder)
    examples = [part for result in encoded(rows, of_any_length(encoder)) for part in each_of(result)]
    if strategy == "wrapped":
        ids = list(chain.from_iterable(example.input_ids for example in examples))
        return list(pieces(ids, list(chain.from_iterable(example.labels for example in examples)), size)), tokens
    split = [piece for example in examples for piece in pieces(example.input_ids, example.labels, size)]
    return PackedRows(split, best_fit([len(piece["input_ids"]) for piece in split], size)), PackEncoder(tokens)


def of_any_length(encoder: Any) -> Any:
    """Return a copy of the encoder, and of the encoders inside it, without a limit on the length of a row."""
    whole = copy(encoder)
    whole.max_prompt_length = maxsize
    for name in ("inner", "turns"):
        if name in vars(encoder):
            setattr(whole, name, of_any_length(getattr(encoder, name)))
    return whole


def encoded(rows: Any, encoder: Any) -> list[Any]:
    """Return the encoder's result for each row: examples, or the reason to skip it. DataError if all are skipped."""
    results = [encoder.encode(rows[index]) for index in range(len(rows))]
    reasons = Counter(result for result in results if isinstance(result, str))
    told = ", ".join(f"{reason} ({count})" for reason, count in reasons.items())
    if reasons.total() == len(results):
        raise DataError(f"no row of the dataset can be used: {told or 'there are none'}")
    if reasons:
        logger.warning("%d of %d rows are left out of training: %s", reasons.total(), len(results), told)
    return results


def pieces(ids: list[int], labels: list[int], size: int) -> Iterator[Row]:
    for at in range(0, len(ids), size):
        yield {"input_ids": ids[at : at + size], "labels": labels[at : at + size]}


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return packs of at most `size` tokens, as lists of row indices. Rows are placed longest first, each into the
    fullest pack that has room. Empty rows are left out."""
    packs: list[list[int]] = []
    spaces: list[int] = []  # the sorted keys of `free`, which has the packs by their free tokens
    free: dict[int, deque[int]] = defaultdict(deque)
    for place in sorted((place for place, length in enumerate(lengths) if length), key=lambda place: -lengths[place]):
        at = bisect_left(spaces, lengths[place])
        space = spaces[at] if at < len(spaces) else size
        if at == len(spaces):
            free[size].append(len(packs))
            packs.append([])
        pack = free[space].popleft()
        if not free[space] and at < len(spaces):
            del spaces[at]
        packs[pack].append(place)
        left = space - lengths[place]
        if left and not free[left]:
            insort(spaces, left)
        free[left].append(pack)
    return packs
