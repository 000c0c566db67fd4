"""How a whole is divided among ranks: by place, or so that all parts cost about the same."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def share(count: int, rank: int, ranks: int) -> range:
    """The places of `count` things that a rank takes: neighbours, as many as any other rank's, or one fewer."""
    return range(count * rank // ranks, count * (rank + 1) // ranks)


def balanced(things: Sequence[T], cost: Callable[[T], float], ranks: int) -> list[list[T]]:
    """A part for each rank, in the order of the things. The dearest is given out first, each to the rank that has the
    least so far: no rank then has more than 4/3 of what the best division gives it."""
    costs = [cost(thing) for thing in things]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for place in sorted(range(len(things)), key=lambda place: (-costs[place], place)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        parts[rank].append(place)
        loads[rank] += costs[place]
    return [[things[place] for place in sorted(part)] for part in parts]
