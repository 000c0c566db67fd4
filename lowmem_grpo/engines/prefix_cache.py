"""The KV cache of finished turns, reused by the next turns of their episodes.

Only the tokens after the cached turn are computed. Rows that are continued together are fed the same number of tokens,
so that each row is contiguous in the cache; a row with fewer new tokens recomputes some of its last cached ones.

States of gated delta nets cannot be cut back, so a prompt that departs before the end of the turn is computed whole.
"""

from dataclasses import dataclass, field

from lowmem_grpo.engines.kv_cache import CacheSlice, GrowingCache
from lowmem_grpo.models.routes import Routes

TWICE, FEW = 0.1, 16  # the most tokens recomputed in a pass: this share of its new tokens, or FEW if that is more


@dataclass(frozen=True)
class KeptPrefix:
    """The cached prefix of one episode: the `len(ids)` places of row `row` of a cache that end at `end`."""

    ids: list[int]  # the cached tokens
    cache: GrowingCache
    row: int
    end: int
    routes: Routes | None = None  # None if the model has no experts

    def shared(self, ids: list[int]) -> int:
        """Return the number of leading prompt tokens that are cached, at most all but the last, which must be fed."""
        most = min(len(self.ids), len(ids) - 1)
        if self.cache.whole_only:
            return most if self.ids == ids[:most] else 0
        if self.ids[:most] == ids[:most]:
            return most
        return next(place for place in range(most) if self.ids[place] != ids[place])

    def piece(self, length: int) -> CacheSlice:
        """Return the cache slice of the first `length` tokens."""
        start = self.end - len(self.ids)
        return CacheSlice(self.cache, slice(self.row, self.row + 1), start, start + length)


@dataclass(frozen=True)
class Continuation:
    """B prompts with cached prefixes, of each of which the last `fed` tokens are fed."""

    rows: list[int]
    prompts: list[list[int]]
    kept: list[KeptPrefix]
    fed: int

    @property
    def held(self) -> list[int]:
        """(B,) tokens taken from the cache."""
        return [max(0, len(ids) - self.fed) for ids in self.prompts]


@dataclass
class PrefixCache:
    """The cached prefixes of a call by episode key, oldest first."""

    rows: dict[int, KeptPrefix] = field(default_factory=dict)
    most: int | None = None  # the most rows to keep, set when memory runs out; None for no limit

    def trim(self, room: int) -> None:
        """Drop the oldest rows until at most `room` are left, or `most` if that is less."""
        most = room if self.most is None else min(room, self.most)
        for key in list(self.rows)[: max(0, len(self.rows) - most)]:
            del self.rows[key]

    def evict(self) -> int:
        """Drop all rows because memory ran out, and limit later ones to half as many; returns the number dropped."""
        count = len(self.rows)
        if count:
            self.most = count // 2
        self.rows.clear()
        return count

    @property
    def nbytes(self) -> int:
        """Bytes held. Rows that left a batch together share one cache, which is freed with the last of them."""
        return sum(cache.nbytes for cache in {id(kept.cache): kept.cache for kept in self.rows.values()}.values())


def fed_together(new: dict[int, int], exactly: bool = False) -> list[list[int]]:
    """Group rows to be fed together, given the `new` tokens of each row: every row of a group is fed as many as its
    first, which has the most. With `exactly`, no row recomputes cached tokens."""
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
