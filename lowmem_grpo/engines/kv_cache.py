"""KV cache layers that grow in place, and layers with gated delta net states, on transformers' public cache classes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin


class GrowingLayer(DynamicLayer):
    """Keys and values (B, H_kv, L, K), in storage with room to grow, so that older tokens are not copied.

    After `GrowingCache.fix`, new tokens are written at an index in a tensor, and no storage moves, as CUDA graphs need.
    """

    storage: Tensor  # (2, B, H_kv, capacity, K)
    length = 0  # L; the views are made when a layer runs, since a replayed graph needs none
    at: Tensor | None = None  # (1,) int64: index along L at which a new token is written; None appends it

    @classmethod
    def holding(cls, storage: Tensor, length: int) -> "GrowingLayer":
        """Return a layer on this storage, of which the first `length` positions are filled."""
        layer = cls()
        layer.lazy_initialization(storage[0], storage[1])
        layer.storage, layer.length = storage, length
        return layer

    def get_seq_length(self) -> int:
        return self.length

    def filled(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values, as views of the storage."""
        return self.storage[0, :, :, : self.length], self.storage[1, :, :, : self.length]

    @classmethod
    def right_aligned(cls, layers: Sequence["GrowingLayer"], pieces: Sequence["CacheSlice"], width: int,
                      room: int) -> "GrowingLayer":
        rows, like = [piece.rows.stop - piece.rows.start for piece in pieces], layers[0].storage
        storage = like.new_zeros(2, sum(rows), like.shape[2], width + room, like.shape[4])
        for layer, piece, count, place in zip(layers, pieces, rows, accumulate(rows), strict=True):
            kept = layer.storage[:, piece.rows, :, piece.start : piece.end]
            storage[:, place - count : place, :, width - piece.end + piece.start : width] = kept
        return cls.holding(storage, width)

    def copied(self, rows: Tensor, room: bool) -> "GrowingLayer":
        """Return a copy of these rows (R,), which may repeat; without `room` the copy cannot grow in place."""
        length = self.length
        storage = self.storage if room else self.storage[:, :, :, :length]
        return self.holding(storage.index_select(1, rows), length)

    @property
    def nbytes(self) -> int:
        return self.storage.untyped_storage().nbytes()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens (B, H, T, K). After `GrowingCache.fix`, write one token at index
        `at` instead. Return the views of all keys and values."""
        if self.at is not None:
            keys, values = self.filled()
            return keys.index_copy_(2, self.at, key_states), values.index_copy_(2, self.at, value_states)
        length, total = self.length, self.length + key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.storage = key_states.new_empty(2, *key_states.shape[:2], total, key_states.shape[3])
        if total > self.storage.shape[3]:
            self.reserve(total + total // 2)
        self.storage[0, :, :, length:total] = key_states
        self.storage[1, :, :, length:total] = value_states
        self.length = total
        return self.filled()

    def reserve(self, capacity: int) -> None:
        """Grow the storage to `capacity` positions."""
        length = self.length
        grown = self.storage.new_empty(*self.storage.shape[:3], capacity, self.storage.shape[4])
        grown[:, :, :, :length] = self.storage[:, :, :, :length]
        grown[:, :, :, length:] = 0  # an attention weight of 0 would not hide a NaN
        self.storage = grown


class StateLayer(LinearAttentionCacheLayerMixin):
    """The states of a gated delta net for B rows: the last inputs (B, C, W - 1) of its convolution, and the recurrent
    state (B, H, K, V) after the last real token, which cannot be cut back to an earlier one."""

    @classmethod
    def holding(cls, conv: Tensor, state: Tensor) -> "StateLayer":
        layer = cls()
        layer.conv_states[0], layer.recurrent_states[0], layer.has_previous_state[0] = conv, state, True
        return layer

    @classmethod
    def right_aligned(cls, layers: Sequence["StateLayer"], pieces: Sequence["CacheSlice"], width: int,
                      room: int) -> "StateLayer":
        both = [[state[piece.rows] for state in layer.states] for layer, piece in zip(layers, pieces, strict=True)]
        return cls.holding(*(torch.cat(parts) for parts in zip(*both, strict=True)))

    @property
    def states(self) -> list[Tensor]:
        """The convolution and recurrent states; empty before the first update."""
        return [state for state in (self.conv_states[0], self.recurrent_states[0]) if state is not None]

    @property
    def nbytes(self) -> int:
        return sum(state.untyped_storage().nbytes() for state in self.states)

    def copied(self, rows: Tensor, room: bool) -> "StateLayer":
        """Return a copy of these rows (R,), which may repeat."""
        return self.holding(*(state.index_select(0, rows) for state in self.states))

    def lazy_initialization(self, *states: Any, **named: Any) -> None:
        """Do nothing: the states are made by the first update."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int = 4,
                          real: Tensor | None = None) -> Tensor:
        """Return the stored inputs followed by the new inputs (B, C, T) as (B, C, W - 1 + T), and store the last W - 1.
        A row whose last token is not `real` (B, T; None: all are) keeps its stored inputs."""
        before = self.conv_states[0]
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:2], conv_kernel_size - 1)
        whole = torch.cat([before, conv_states], -1)
        self.conv_states[0] = unless_done(whole[..., 1 - conv_kernel_size :], before, real)
        self.has_previous_state[0] = True
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0,
                               real: Tensor | None = None) -> Tensor:
        """Store the states after new tokens, for rows whose last token is `real` (B, T; None: all)."""
        before = self.recurrent_states[0]
        after = recurrent_states if before is None else unless_done(recurrent_states, before, real)
        self.recurrent_states[0] = after
        return after


def unless_done(after: Tensor, before: Tensor, real: Tensor | None) -> Tensor:
    """Return each row's new state `after` (B, ...), or the state `before` if its last token is not `real` (B, T)."""
    if real is None:
        return after.clone()  # `after` may be a view of the caller's tensor
    return torch.where(real[:, -1].view(-1, *[1] * (after.dim() - 1)), after, before)


@dataclass(eq=False)
class LastingStorage:
    """KV storage (2, R, H_kv, C, K) per layer that outlives the caches that use it. A cache uses rows from `first` on,
    and fills the C positions of a row from the left. Unused positions hold finite numbers."""

    rows: int
    capacity: int
    first: int = 0
    layers: dict[int, Tensor] = field(default_factory=dict)  # by layer index, allocated at first use

    def show(self, place: int, rows: int, like: Tensor) -> Tensor:
        """Return `rows` rows of the storage of layer number `place`, which is allocated at first use for keys of the
        shape of `like` (B, H_kv, T, K)."""
        if place not in self.layers:
            self.layers[place] = like.new_zeros(2, self.rows, like.shape[1], self.capacity, like.shape[3])
        return self.layers[place][:, self.first : self.first + rows]

    def move(self, place: int, layer: GrowingLayer) -> None:
        """Copy the keys and values of layer number `place` into this storage, and let the layer use it."""
        length, here = layer.length, self.show(place, layer.storage.shape[1], layer.storage[0])
        here[:, :, :, :length] = layer.storage[:, :, :, :length]
        layer.storage = here


class GrowingCache(Cache):
    """A cache of one `GrowingLayer` or `StateLayer` per decoder layer, each made at first use."""

    layers: list[Any]

    def __init__(self, layers: Iterable[Any] = (), lasting: "LastingStorage | None" = None) -> None:
        """Make a cache whose rows are stored in `lasting`; None if each layer owns its storage."""
        super().__init__(layer_class_to_replicate=GrowingLayer)
        self.layers, self.lasting = [*layers], lasting

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def whole_only(self) -> bool:
        """True if rows can only continue from their last token, because a recurrent state cannot be cut."""
        return any(isinstance(layer, StateLayer) for layer in self.layers)

    @property
    def growing(self) -> list[GrowingLayer]:
        return [layer for layer in self.layers if isinstance(layer, GrowingLayer)]

    def fix(self, at: Tensor, rows: int, capacity: int) -> None:
        """From now on write the keys and values of new tokens at index `at` (1,), in storage of at least `capacity`
        positions. If `lasting` is set, each layer uses `rows` rows of it; rows after the cache's own are ignored."""
        for place, layer in enumerate(self.layers):
            if isinstance(layer, GrowingLayer):
                layer.at = at
                if self.lasting is not None:
                    layer.storage = self.lasting.show(place, rows, layer.storage[0])
        self.reserve(capacity)

    def reserve(self, capacity: int) -> None:
        for layer in self.growing:
            if layer.storage.shape[3] < capacity:
                layer.reserve(capacity)

    def select(self, rows: Tensor) -> None:
        """Reduce the cache to these rows (R,), which may repeat."""
        for place, layer in enumerate(self.layers):
            self.layers[place] = layer.copied(rows, room=self.lasting is None)
            if self.lasting is not None:
                self.lasting.move(place, self.layers[place])

    def cut(self, length: int) -> None:
        """Show only the first `length` positions of every layer; the storage stays."""
        for layer in self.growing:
            layer.length = length

    def copied(self, rows: Tensor) -> "GrowingCache":
        """Return a copy of these rows (R,), without room to grow."""
        return GrowingCache(layer.copied(rows, room=False) for layer in self.layers)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append keys and values to a layer; a new layer is made in the lasting storage, if there is one."""
        if self.lasting is not None and layer_idx == len(self.layers):
            storage = self.lasting.show(layer_idx, len(key_states), key_states)
            self.layers.append(GrowingLayer.holding(storage, 0))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Store a layer's last convolution inputs, and return old and new ones. The first call makes the layer."""
        if layer_idx == len(self.layers):
            self.layers.append(StateLayer())
        whole: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        return whole


@dataclass(frozen=True)
class CacheSlice:
    """A part of a cache: the positions from `start` to `end` of some rows."""

    cache: GrowingCache
    rows: slice
    start: int
    end: int


def right_aligned(pieces: list[CacheSlice], width: int, room: int = 0, give: bool = False) -> GrowingCache:
    """Return a cache with the rows of all pieces in order, right-aligned at `width` positions, and storage for `room`
    more. The padding is zeros, since a NaN would spread even with an attention weight of 0. With `give`, the source
    caches lose each layer once it is copied."""
    made, lasting = list[Any](), pieces[0].cache.lasting
    for place in range(len(pieces[0].cache.layers)):
        layers = [piece.cache.layers[place] for piece in pieces]
        made.append(layers[0].right_aligned(layers, pieces, width, room))
        if lasting is not None:
            lasting.move(place, made[-1])
        for piece in pieces if give else ():
            piece.cache.layers[place] = None
    return GrowingCache(made, lasting)
