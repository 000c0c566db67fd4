"""Where a step's completions are cut into micro-batches: by the places they take, and by what attention lays side by
side. Only lengths decide, so that plans can count micro-batches without a model and without torch.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from lowmem_grpo.memory.token_rows import token_rows

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
    if limits.sequences is not None and len(batch) > limits.sequences:
        return True
    return limits.tokens is not None and (places(batch) > limits.tokens or area(batch) > limits.spread * limits.tokens)


def places(batch: list[Span]) -> int:
    """Tokens that the layers see: a prompt up to its last token once, and each sequence with that token before it."""
    return sum(map(sum, families(batch)))


def area(batch: list[Span]) -> int:
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
