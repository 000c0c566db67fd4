"""`Place`: which of a run's processes this one is, as torchrun and accelerate's launchers tell it. Loads no torch."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # not LOCAL_WORLD_SIZE, which vLLM sets to its own
CARDS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Place:
    """This process among `count`; `local` is its number on its machine."""

    rank: int = 0
    count: int = 1
    local: int = 0

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and shows what the run does."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Return which of `count` things, in their order, are this process's: neighbours, as many as any other's, or
        one fewer."""
        return range(count * self.rank // self.count, count * (self.rank + 1) // self.count)


def this_place() -> Place:
    """The place that a launcher gave this process; without a launcher it is the only one. ValueError where the
    launcher's variables do not fit together."""
    given = {name: os.environ[name] for name in NAMES if name in os.environ}
    if given.get("WORLD_SIZE", "1") == "1":
        return Place()
    try:
        count = int(given["WORLD_SIZE"])
        place = Place(int(given["RANK"]), count, int(given.get("LOCAL_RANK", given["RANK"])))
    except (KeyError, ValueError):
        place = Place(-1)
    if not 0 <= place.rank < place.count or not 0 <= place.local <= place.rank:
        told = ", ".join(f"{name}={given.get(name)!r}" for name in NAMES)
        raise ValueError(f"this process is to be one of several, and its variables do not fit together: {told}. Start "
                         "it with torchrun --nproc-per-node N, or unset them for a run in one process")
    return place


def one_process(what: str) -> None:
    """ValueError where the run has several processes, and `what` needs one."""
    if (place := this_place()).count > 1:
        raise ValueError(f"{what} needs one process, and this is rank {place.rank} of {place.count}: start it without "
                         "torchrun")


def own_device(cards: int) -> str:
    """The device of this process, which sees so many cards: the one of its place on the machine, or the only one."""
    return f"cuda:{this_place().local % cards}" if cards else "cpu"


def take_card() -> None:
    """Let this process see only its own card of those that its machine's processes share. It has to be called before
    torch looks for cards. ValueError where there are fewer cards than processes, as far as that can be told."""
    place = this_place()
    if place.count == 1:
        return
    listed = [name for name in os.environ.get(CARDS, "").split(",") if name]
    if CARDS in os.environ and not listed:
        return  # the cards are hidden: the run is on processors
    if listed and place.local >= len(listed):
        raise ValueError(f"rank {place.rank} is process {place.local} of its machine, and has no card: {CARDS} lists "
                         f"{len(listed)} ({','.join(listed)}). Start at most one process for each card")
    os.environ[CARDS] = listed[place.local] if listed else str(place.local)


def balanced(things: Sequence[T], cost: Callable[[T], float], ranks: int) -> list[list[T]]:
    """Return a part for each rank, in the order of the things. The dearest is given out first, each to the rank that
    has the least so far: no rank then has more than 4/3 of what the best division gives it."""
    costs = [cost(thing) for thing in things]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for place in sorted(range(len(things)), key=lambda place: (-costs[place], place)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        parts[rank].append(place)
        loads[rank] += costs[place]
    return [[things[place] for place in sorted(part)] for part in parts]
