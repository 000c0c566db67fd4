"""A key-value cache that grows in place, built from the public cache classes of transformers."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):
    """Keys and values (B, H_kv, L, K) as views of storage with room to grow, so that a new token copies only itself.

    `DynamicLayer` concatenates, so each new token copies the whole cache. Here full storage grows by half.
    """

    storage: Tensor  # (2, B, H_kv, capacity, K)

    @classmethod
    def holding(cls, storage: Tensor, length: int) -> "GrowingLayer":
        """A layer whose first `length` tokens are in `storage` (2, B, H_kv, capacity, K)."""
        layer = cls()
        layer.lazy_initialization(storage[0], storage[1])
        layer.storage = storage
        layer.view(length)
        return layer

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        length = self.get_seq_length()
        total = length + key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.storage = key_states.new_empty(2, *key_states.shape[:2], total, key_states.shape[3])
        if total > self.storage.shape[3]:
            self.reserve(total + total // 2)
        self.storage[0, :, :, length:total] = key_states
        self.storage[1, :, :, length:total] = value_states
        return self.view(total)

    def view(self, length: int) -> tuple[Tensor, Tensor]:
        """Make the first `length` tokens the cache's content."""
        self.keys, self.values = self.storage[0, :, :, :length], self.storage[1, :, :, :length]
        return self.keys, self.values

    def reserve(self, capacity: int) -> None:
        """Move to storage for `capacity` tokens."""
        length = self.get_seq_length()
        grown = self.storage.new_empty(*self.storage.shape[:3], capacity, self.storage.shape[4])
        grown[:, :, :, :length] = self.storage[:, :, :, :length]
        self.storage = grown
        self.view(length)

    def batch_select_indices(self, indices: Tensor) -> None:
        length = self.get_seq_length()
        self.storage = self.storage.index_select(1, indices)
        self.view(length)


class GrowingCache(Cache):
    """A cache of `GrowingLayer`s, one for each decoder layer, made at first use."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)

    @classmethod
    def holding(cls, storages: list[Tensor], length: int) -> "GrowingCache":
        """A cache whose layers are in these storages."""
        cache = cls()
        cache.layers = [GrowingLayer.holding(storage, length) for storage in storages]
        return cache

    @property
    def storages(self) -> list[Tensor]:
        """(2, B, H_kv, capacity, K) of each layer."""
        return [layer.storage for layer in self.layers if isinstance(layer, GrowingLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes of storage held."""
        return sum(storage.untyped_storage().nbytes() for storage in self.storages)

    def copied(self, rows: Tensor) -> "GrowingCache":
        """A cache of some of the rows (R,), without room to grow."""
        length = self.get_seq_length()
        return self.holding([storage[:, :, :, :length].index_select(1, rows) for storage in self.storages], length)


@dataclass(frozen=True)
class Piece:
    """The places from `start` to `end` of some rows of a cache."""

    cache: GrowingCache
    rows: slice
    start: int
    end: int


def right_aligned(pieces: list[Piece], width: int, room: int = 0) -> GrowingCache:
    """A cache of `width` places and `room` for more, with the rows of all pieces in order; each ends at the right edge.
    Places before a row are zero: a weight of 0 in attention would not hide a NaN there."""
    rows = [piece.rows.stop - piece.rows.start for piece in pieces]
    storages = []
    for layer, like in enumerate(pieces[0].cache.storages):
        storage = like.new_zeros(2, sum(rows), like.shape[2], width + room, like.shape[4])
        for count, piece, place in zip(rows, pieces, accumulate(rows), strict=True):
            kept = piece.cache.storages[layer][:, piece.rows, :, piece.start : piece.end]
            storage[:, place - count : place, :, width - piece.end + piece.start : width] = kept
        storages.append(storage)
    return GrowingCache.holding(storages, width)


def left_padded(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids (P, L), and whether each place holds a real token (P, L); prompts end at the right edge."""
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(prompts), width), pad_id)
    real = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        real[row, width - len(prompt) :] = True
    return input_ids.to(device), real.to(device)
