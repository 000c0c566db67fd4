"""Keys and values at fixed addresses: what a token step needs so that it can be recorded once and run again."""

from typing import Any

from torch import Tensor

from lowmem_grpo.engines.kv_cache import GrowingCache

STEP = 128  # places by which the storage of a row grows


def capacity_for(width: int) -> int:
    """Places that are held for rows of `width` places: at most STEP - 1 more."""
    return -(-width // STEP) * STEP


class FixedCache(GrowingCache):
    """A `GrowingCache` for steps of one token. All rows write at one place, which a tensor on the device says, and
    attention reads all places that the held cache shows (`cut`), of which a mask says which hold a token."""

    def __init__(self, held: GrowingCache, at: Tensor) -> None:
        """`at` (1,) int64, one of the places that `held` shows."""
        super().__init__()
        self.held, self.at = held, at

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write those of one new token a row (B, H, 1, K); returns all that are shown, (B, H, L, K)."""
        layer = self.held.layers[layer_idx]
        layer.keys.index_copy_(2, self.at, key_states)
        layer.values.index_copy_(2, self.at, value_states)
        return layer.keys, layer.values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Places that attention reads."""
        return self.held.get_seq_length(layer_idx)
