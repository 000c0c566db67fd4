"""Keys and values of turns that were given, for the next turns of their episodes.

Only what came after the turn has to be computed. Rows that are continued together are fed equally many tokens, since
each row has to be one piece in the cache; a row with fewer new tokens computes some of its last ones again.

States of gated delta nets cannot be cut: a prompt that goes on from an earlier token is computed as a whole.
"""

from dataclasses import dataclass, field

from lowmem_grpo.engines.kv_cache import CacheSlice, GrowingCache
from lowmem_grpo.models.routes import Routes

TWICE, FEW = 0.1, 16  # tokens computed again in a pass, at most: a share of its new ones, or so many


@dataclass(frozen=True)
class KeptPrefix:
    """The keys and values of one row, in the places of a cache that end at `end`."""

    ids: list[int]  # the tokens that they are of
    cache: GrowingCache
    row: int
    end: int
    routes: Routes | None = None  # where the model has experts

    def shared(self, ids: list[int]) -> int:
        """Return how many tokens at the beginning of a prompt are held; its last one is always left to be fed."""
        most = min(len(self.ids), len(ids) - 1)
        if self.cache.whole_only:
            return most if self.ids == ids[:most] else 0
        if self.ids[:most] == ids[:most]:
            return most
        return next(place for place in range(most) if self.ids[place] != ids[place])

    def piece(self, length: int) -> CacheSlice:
        start = self.end - len(self.ids)
        return CacheSlice(self.cache, slice(self.row, self.row + 1), start, start + length)


@dataclass(frozen=True)
class Continuation:
    """B prompts whose first tokens are held; of each, the last `fed` tokens are fed."""

    rows: list[int]
    prompts: list[list[int]]
    kept: list[KeptPrefix]
    fed: int

    @property
    def held(self) -> list[int]:
        """(B,) tokens that are not computed again."""
        return [max(0, len(ids) - self.fed) for ids in self.prompts]


@dataclass
class PrefixCache:
    """The rows of one call, by the key of the episode, the oldest first."""

    rows: dict[int, KeptPrefix] = field(default_factory=dict)
    most: int | None = None  # that memory had room for; None while it never ran out beside them

    def trim(self, room: int) -> None:
        """Drop the oldest until there are at most `room`, or as many as memory had room for."""
        most = room if self.most is None else min(room, self.most)
        for key in list(self.rows)[: max(0, len(self.rows) - most)]:
            del self.rows[key]

    def evict(self) -> int:
        """Drop all because memory ran out, and keep half as many from now on; returns how many they were."""
        count = len(self.rows)
        if count:
            self.most = count // 2
        self.rows.clear()
        return count

    @property
    def nbytes(self) -> int:
        """Bytes held; rows that left a batch together are in one cache, which goes with the last of them."""
        return sum(cache.nbytes for cache in {id(kept.cache): kept.cache for kept in self.rows.values()}.values())


def fed_together(new: dict[int, int], exactly: bool = False) -> list[list[int]]:
    """Rows in lists, each of which is fed as many tokens as its first row has `new` ones (row to tokens); exactly: no
    row computes any again."""
    lists: list[list[int]] = []
    again = total = 0
    for row in sorted(new, key=lambda row: -new[row]):
        again += new[lists[-1][0]] - new[row] if lists else 0
        total += new[row]
        if not lists or again > (0 if exactly else max(TWICE * total, FEW)):
            lists.append([])
            again, total = 0, new[row]
        lists[-1].append(row)
    return lists
