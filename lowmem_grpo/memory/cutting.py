"""Cut a step's completions into micro-batches, by their packed tokens and by the padded tokens that attention needs.
Only lengths decide, so that plans can count micro-batches without a model and without torch.

Attention computes the sequences of a micro-batch in one of two ways:

    side by side   all sequences in one call, (S, W): each with a copy of its prompt, padded to the longest
    prompts once   one call per prompt and one per completion, which attends to its prompt's keys and its own: fewer
                   pairs of a query and a key, and no padding, but more launches

With a sliding window, queries are taken in blocks, each against the preceding keys within the window.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

Prompts = Sequence[Sequence[int]]  # for each prompt: its packed tokens, then those of each completion
PAIRS_A_CALL = 2**20  # (query, key) pairs whose work outweighs the kernel launches of one more call
KEY_SHARE = 1 / 2  # upper bound on the share of keys and values in a row, reached if there are as many heads as queries
BLOCK = 1024  # queries that share one sliding-window mask
ALIGNED = 16  # elements to which mask rows are aligned, as fused attention requires
SPREAD = 2.0  # used without a plan: many short completions of a long prompt need far more tokens padded than packed


@dataclass(frozen=True)
class CutLimits:
    """The limits of a micro-batch; None is no limit. A unit that exceeds a limit gets its own micro-batch."""

    tokens: int | None = None  # packed tokens
    sequences: int | None = None  # completions; an episode of several packed sequences counts as one
    spread: float = SPREAD  # padded or copied tokens in attention, as a multiple of `tokens`


class Lengths(NamedTuple):
    """The lengths of a packed sequence."""

    family: Hashable  # sequences of one family in a group share their prompt's packed tokens
    prompt: int  # tokens
    tokens: int  # after the prompt

    @property
    def whole(self) -> int:
        """The number of the sequence's tokens without the last one, which is only a target."""
        return self.prompt + self.tokens - 1


@dataclass(frozen=True)
class Span:
    """The lengths of one completion's packed sequences, and its position in the step."""

    group: int  # the index of its group
    rollout: int  # its index in the group
    sequences: tuple[Lengths, ...]  # one, or those of an episode; empty if nothing is trained
    unit: int | None = None  # completions of a group with the same unit share a micro-batch; None: a unit of its own

    @property
    def length(self) -> int:
        return max(sequence.whole for sequence in self.sequences)


def cut(groups: Iterable[tuple[int, Sequence[int]]], limits: CutLimits) -> list[list[Span]]:
    """Return the micro-batches for groups of (tokens of the prompt, tokens of each completion)."""
    return cut_spans([
        [Span(group, number, (Lengths(None, prompt, tokens),) if tokens else ())
         for number, tokens in enumerate(completions)]
        for group, (prompt, completions) in enumerate(groups)
    ], limits)


def cut_spans(groups: Iterable[Sequence[Span]], limits: CutLimits) -> list[list[Span]]:
    """Return the micro-batches for groups of completions, in the order of `ordered`. No unit is split."""
    units: dict[Hashable, list[Span]] = {}
    for span in ordered(groups):
        units.setdefault((span.group, span.unit, span.unit is None and span.rollout), []).append(span)
    batches: list[list[Span]] = []
    for unit in units.values():
        if not batches or full([*batches[-1], *unit], limits):
            batches.append([])
        batches[-1] += unit
    return batches


def ordered(groups: Iterable[Sequence[Span]]) -> Iterator[Span]:
    """Yield all completions with a sequence, group by group, so that neighbours share their prompt and have similar
    lengths: the group with the longest completion first, and the longest completion of a group first."""
    filled = [[span for span in spans if span.sequences] for spans in groups]
    by_length = [sorted(spans, key=lambda span: span.length, reverse=True) for spans in filled if spans]
    for spans in sorted(by_length, key=lambda spans: spans[0].length, reverse=True):
        yield from spans


def full(batch: list[Span], limits: CutLimits) -> bool:
    if limits.sequences is not None and len(batch) > limits.sequences:
        return True
    bound = limits.tokens
    return bound is not None and (packed_tokens(batch) > bound or area(batch) > limits.spread * bound)


def packed_tokens(batch: list[Span]) -> int:
    """Return a micro-batch's number of packed tokens. A shared prompt counts once, without its last token."""
    return sum(map(sum, families(batch)))


def area(batch: list[Span]) -> int:
    """Return the number of tokens that attention pads or copies for a micro-batch."""
    return token_rows(families(batch))


def families(batch: list[Span]) -> list[list[int]]:
    """Return, for each prompt, its number of packed tokens and that of each sequence that shares it. Only neighbours of
    one group share a prompt."""
    by_prompt: list[list[int]] = []
    for _, spans in groupby(batch, key=lambda span: span.group):
        lengths: dict[Hashable, list[int]] = {}
        for span in spans:
            for family, prompt, tokens in span.sequences:
                lengths.setdefault(family, [prompt - 1]).append(tokens)
        by_prompt += lengths.values()
    return by_prompt


def prompts_once(prompts: Prompts) -> bool:
    """Return whether computing each prompt once saves enough (query, key) pairs to outweigh the extra calls. A prompt
    with a single completion needs no extra call."""
    side_by_side = count_sequences(prompts) * widest(prompts) ** 2 // 2
    pairs = sum(own**2 // 2 + sum(length * (own + length // 2) for length in others) for own, *others in prompts)
    calls = sum(len(others) + (own > 0 and len(others) > 1) for own, *others in prompts)
    return side_by_side - pairs > PAIRS_A_CALL * (calls - 1)


def token_rows(prompts: Prompts) -> int:
    """Return how many rows, one per token, attention stores in addition to the packed tokens. If a completion's keys
    and values are copied next to its prompt's, each token of both counts as another KEY_SHARE of a row."""
    if count_sequences(prompts) == 1:
        return 0
    if not prompts_once(prompts):
        return count_sequences(prompts) * widest(prompts)
    copied = sum(own + length for own, *others in prompts if own and len(others) > 1 for length in others)
    return sum(map(sum, prompts)) + int(KEY_SHARE * copied)


def count_sequences(prompts: Prompts) -> int:
    return sum(len(others) for _, *others in prompts)


def widest(prompts: Prompts) -> int:
    """Return the length of the longest sequence with its prompt."""
    return max(own + max(others) for own, *others in prompts)


def window_block(width: int) -> int:
    return min(BLOCK, width)


def window_reach(window: int, width: int) -> int:
    """Return how many keys before a block of queries the block reads: the window, rounded up."""
    return -(-min(window - 1, width) // ALIGNED) * ALIGNED


def mask_numbers(window: int | None, width: int) -> int:
    """Return the elements of the one mask that all blocks and layers with a window share; 0 if no window applies."""
    if window is None or window >= width:
        return 0
    block = window_block(width)
    return block * -(-(window_reach(window, width) + block) // ALIGNED) * ALIGNED
