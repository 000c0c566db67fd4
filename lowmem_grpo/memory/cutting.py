"""The cut of a step's completions into micro-batches: by the places they take, and by what attention lays side by side.
Only lengths decide, so that plans can count micro-batches without a model and without torch.

Attention takes the sequences of a micro-batch in one of two ways:

    side by side   all sequences in one call, (S, W): each with a copy of its prompt, and as wide as the longest
    prompts once   a call for each prompt and one for each of its completions, whose keys are the prompt's and its own:
                   P^2 instead of G P^2 pairs of a query and a key, and no padding, but more launches

`Prompts` are those of a micro-batch: for each the places of its own, P - 1, and those of each of its completions.
A sliding window takes blocks of queries, each against the keys before it that are within its reach.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

Prompts = Sequence[Sequence[int]]
PAIRS_A_CALL = 2**20  # pairs of a query and a key, whose work takes a card longer than the launches of one more call
KEY_SHARE = 1 / 2  # share of a row, at most: keys and values only, and as many heads of them as of queries
BLOCK = 1024  # queries that meet a window's mask at a time
ALIGNED = 16  # numbers: rows of masks begin at multiples, as fused attention wants them
SPREAD = 2.0  # without a plan: many short completions of a long prompt take far more side by side than packed


@dataclass(frozen=True)
class Limits:
    """The limits of a micro-batch; None is no bound. A single completion that exceeds it is alone."""

    tokens: int | None = None  # places
    sequences: int | None = None  # completions; an episode of several packed sequences is one
    spread: float = SPREAD  # places that attention may lay side by side, as a multiple of `tokens`


class Lengths(NamedTuple):
    """A packed sequence by its lengths."""

    family: Hashable  # sequences of one family of a group share the places of their prompt
    prompt: int  # tokens
    tokens: int  # behind the prompt

    @property
    def whole(self) -> int:
        """All its tokens but the last, which is a target only."""
        return self.prompt + self.tokens - 1


@dataclass(frozen=True)
class Span:
    """A completion by the lengths of its packed sequences, and where it stands in its step."""

    group: int  # the index of its group
    rollout: int  # its index in the group
    sequences: tuple[Lengths, ...]  # one, or those of an episode; none where nothing is trained

    @property
    def length(self) -> int:
        return max(sequence.whole for sequence in self.sequences)


def cut(groups: Iterable[tuple[int, Sequence[int]]], limits: Limits) -> list[list[Span]]:
    """The micro-batches of groups that are given as (tokens of the prompt, tokens of each completion)."""
    return cut_spans([
        [Span(group, number, (Lengths(None, prompt, tokens),) if tokens else ())
         for number, tokens in enumerate(completions)]
        for group, (prompt, completions) in enumerate(groups)
    ], limits)


def cut_spans(groups: Iterable[Sequence[Span]], limits: Limits) -> list[list[Span]]:
    """The micro-batches of groups of completions, each of which stays whole. Completions follow each other group by
    group, longest first, so that those of one micro-batch are alike in length and neighbours share their prompt. Those
    without a sequence are left out."""
    batches: list[list[Span]] = []
    for span in ordered(groups):
        if not batches or full([*batches[-1], span], limits):
            batches.append([])
        batches[-1].append(span)
    return batches


def ordered(groups: Iterable[Sequence[Span]]) -> Iterator[Span]:
    """Groups by their longest completion with its prompt, completions by length, longest first; ties as they came."""
    filled = [[span for span in spans if span.sequences] for spans in groups]
    by_length = [sorted(spans, key=lambda span: span.length, reverse=True) for spans in filled if spans]
    for spans in sorted(by_length, key=lambda spans: spans[0].length, reverse=True):
        yield from spans


def full(batch: list[Span], limits: Limits) -> bool:
    """Return whether a micro-batch exceeds a limit."""
    if limits.sequences is not None and len(batch) > limits.sequences:
        return True
    return limits.tokens is not None and (places(batch) > limits.tokens or area(batch) > limits.spread * limits.tokens)


def places(batch: list[Span]) -> int:
    """Tokens that the layers see: a prompt up to its last token once, and each sequence with that token before it."""
    return sum(map(sum, families(batch)))


def area(batch: list[Span]) -> int:
    """Return the places that attention lays side by side, or copies, for a micro-batch."""
    return token_rows(families(batch))


def families(batch: list[Span]) -> list[list[int]]:
    """For each prompt, its own places and those of each sequence that shares it: of neighbours of one group."""
    by_prompt: list[list[int]] = []
    for _, spans in groupby(batch, key=lambda span: span.group):
        lengths: dict[Hashable, list[int]] = {}
        for span in spans:
            for family, prompt, tokens in span.sequences:
                lengths.setdefault(family, [prompt - 1]).append(tokens)
        by_prompt += lengths.values()
    return by_prompt


def prompts_once(prompts: Prompts) -> bool:
    """Return whether prompts are computed once, because the pairs of a query and a key that this saves are worth its
    calls; a completion without others goes with its prompt."""
    side_by_side = count_sequences(prompts) * widest(prompts) ** 2 // 2
    pairs = sum(own**2 // 2 + sum(length * (own + length // 2) for length in others) for own, *others in prompts)
    calls = sum(len(others) + (own > 0 and len(others) > 1) for own, *others in prompts)
    return side_by_side - pairs > PAIRS_A_CALL * (calls - 1)


def token_rows(prompts: Prompts) -> int:
    """Rows that attention holds beside the packed ones; keys and values copied alone count as a part of a row."""
    if count_sequences(prompts) == 1:
        return 0
    if not prompts_once(prompts):
        return count_sequences(prompts) * widest(prompts)
    copied = sum(own + length for own, *others in prompts if own and len(others) > 1 for length in others)
    return sum(map(sum, prompts)) + int(KEY_SHARE * copied)


def count_sequences(prompts: Prompts) -> int:
    return sum(len(others) for _, *others in prompts)


def widest(prompts: Prompts) -> int:
    """Return the tokens of the longest sequence, with its prompt."""
    return max(own + max(others) for own, *others in prompts)


def window_block(width: int) -> int:
    """Return queries of a block where the longest sequence has `width` tokens."""
    return min(BLOCK, width)


def window_reach(window: int, width: int) -> int:
    """Keys before a block that it is shown: those of its window, and a few more, which the mask hides."""
    return -(-min(window - 1, width) // ALIGNED) * ALIGNED


def mask_numbers(window: int | None, width: int) -> int:
    """Numbers of the one mask that all blocks and layers with a window share; 0 where there is no window."""
    if window is None or window >= width:
        return 0
    block = window_block(width)
    return block * -(-(window_reach(window, width) + block) // ALIGNED) * ALIGNED
