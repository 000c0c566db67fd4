"""Where a step's completions are cut into micro-batches: by the places they take, and by what attention lays side by
side. Only lengths decide, so that plans can count micro-batches without a model and without torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from lowmem_grpo.memory.token_rows import token_rows

SPREAD = 2.0  # without a plan: many short completions of a long prompt take far more side by side than packed


@dataclass(frozen=True)
class Limits:
    """What a micro-batch may hold; None is no bound. A single sequence that exceeds it has a micro-batch of its own."""

    tokens: int | None = None  # places
    sequences: int | None = None
    spread: float = SPREAD  # places that attention may lay side by side, as a multiple of `tokens`


@dataclass(frozen=True)
class Span:
    """A completion by its lengths, and where it stands in its step."""

    group: int  # the index of its group; spans of one group share their prompt
    rollout: int  # its index in the group
    prompt: int  # tokens
    completion: int  # tokens

    @property
    def length(self) -> int:
        """Tokens of prompt and completion but the last, which is a target only."""
        return self.prompt + self.completion - 1


def cut(groups: Iterable[tuple[int, Sequence[int]]], limits: Limits) -> list[list[Span]]:
    """The micro-batches of groups that are given as (tokens of the prompt, tokens of each completion).

    Completions follow each other group by group, longest first, so that those of one micro-batch are alike in length
    and neighbours share their prompt. Empty completions are left out.
    """
    batches: list[list[Span]] = []
    for span in ordered(groups):
        if not batches or full([*batches[-1], span], limits):
            batches.append([])
        batches[-1].append(span)
    return batches


def ordered(groups: Iterable[tuple[int, Sequence[int]]]) -> Iterator[Span]:
    """Groups by their longest completion with its prompt, completions by length, longest first; ties as they came."""
    filled = [[Span(group, number, prompt, tokens) for number, tokens in enumerate(completions) if tokens]
              for group, (prompt, completions) in enumerate(groups)]
    by_length = [sorted(spans, key=lambda span: span.length, reverse=True) for spans in filled if spans]
    for spans in sorted(by_length, key=lambda spans: spans[0].length, reverse=True):
        yield from spans


def full(batch: list[Span], limits: Limits) -> bool:
    """Whether these would be too much for one micro-batch."""
    if limits.sequences is not None and len(batch) > limits.sequences:
        return True
    return limits.tokens is not None and (places(batch) > limits.tokens or area(batch) > limits.spread * limits.tokens)


def places(batch: list[Span]) -> int:
    """Tokens that the layers see: a prompt up to its last token once, and each completion with that token before it."""
    return sum(spans[0].prompt - 1 for spans in families(batch)) + sum(span.completion for span in batch)


def area(batch: list[Span]) -> int:
    """Places that attention lays side by side, as `token_rows` counts them."""
    return token_rows([(spans[0].prompt - 1, *(span.completion for span in spans)) for spans in families(batch)])


def families(batch: list[Span]) -> Iterator[list[Span]]:
    """Neighbours that share a prompt."""
    for _, spans in groupby(batch, key=lambda span: span.group):
        yield list(spans)
