"""Causal attention over packed sequences: in one call with padding, or with each prompt once and then its completions.

No (T, T) mask is ever made. Padding is on the right, which causal attention never reads, so padded sequences need no
mask. With a sliding window, blocks of queries attend to the keys within reach, and the mask of one block serves all
blocks and all layers. memory/cutting.py decides when prompts are computed once, and how large the blocks are.
"""

from collections import UserDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right

from lowmem_grpo.kernels.custom_op import once_differentiable
from lowmem_grpo.kernels.packed_to_padded import packed_to_padded, padded_to_packed
from lowmem_grpo.memory.cutting import ALIGNED, prompts_once, window_block, window_reach
from lowmem_grpo.models.attention_sinks import as_autocast, attention_with_sinks
from lowmem_grpo.models.head_groups import by_head_groups
from lowmem_grpo.types import MicroBatch

Masks = dict[tuple[Any, ...], Tensor]


@dataclass
class PackedLayout:
    """The map between packed tokens and a padded (S, W) layout, W = max_seqlen, and the form of attention to use."""

    sources: Tensor  # (S * W,) int64, index into T
    places: Tensor  # (T,) int64, index into S * W
    copies: Tensor  # (T,) int64, number of sequences that share the token
    prompts: tuple[tuple[int, ...], ...]  # per prompt: its number of packed tokens, then that of each completion
    num_sequences: int  # S
    width: int  # W
    once: bool  # compute each prompt once instead of padding
    head_groups: int = 1  # parts in which attention's backward pass takes the heads
    calls: int = 0  # calls of attention or delta nets with this layout: after a forward pass, the number of layers
    masks: Masks = field(default_factory=dict)  # sliding-window masks, shared by all layers
    stages: Any = None  # the `Stages` of gated delta nets, shared by all layers

    @classmethod
    def from_batch(cls, batch: MicroBatch, head_groups: int = 1) -> "PackedLayout":
        """Return the layout of a micro-batch; attention's backward pass takes the heads in `head_groups` parts."""
        sequences = len(batch.cu_seqlens) - 1
        once = sequences > 1 and prompts_once(batch.prompts)
        return cls(batch.sources, batch.places, batch.copies, batch.prompts, sequences, batch.max_seqlen, once,
                   head_groups)

    def scatter(self, *packed: Tensor) -> tuple[Tensor, ...]:
        """Return each packed (1, H, T, K) as padded (S, H, W, K). The padding repeats a token of the sequence."""
        if self.num_sequences == 1:  # nothing to move
            return packed
        rows = [heads.squeeze(0).transpose(0, 1) for heads in packed]
        alike = [rows] if len({heads.shape[2] for heads in rows}) == 1 else [[heads] for heads in rows]
        places = self.sources, self.places, self.copies, self.width
        return tuple(heads for together in alike for heads in packed_to_padded(together, *places))

    def gather(self, side_by_side: Tensor) -> Tensor:
        """Return padded (S, H, W, K) as packed (1, T, H, K)."""
        if self.num_sequences == 1:
            return side_by_side.transpose(1, 2)
        return padded_to_packed(side_by_side, self.sources, self.places)[None]


class FirstKeys(UserDict):
    """Keys and values that some layers share with later ones, by layer type. Only a type's first pair is stored:
    storing the pairs of layers that are recomputed in backward would keep most recomputed tensors on the device."""

    def __setitem__(self, kind: str, keys_and_values: Any) -> None:
        if kind not in self:
            super().__setitem__(kind, keys_and_values)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None,
                     dropout: float, sliding_window: int | None, sinks: Tensor | None = None) -> Tensor:
    """Return causal attention within each packed sequence, from (1, H, T, K) to (1, T, H, K), with the heads' `sinks`
    (H,) if they have some."""
    causal = Causal(scaling, dropout, sliding_window, layout.width, layout.masks, layout.head_groups, sinks)
    if layout.once:
        return each_prompt_once(query, key, value, layout.prompts, causal)
    return layout.gather(causal(*layout.scatter(query, key, value)))


@dataclass(frozen=True)
class Causal:
    """Causal attention of the last Q of L tokens, with an optional sliding window and sinks."""

    scaling: float | None
    dropout: float
    window: int | None
    width: int  # tokens of the longest sequence, W
    masks: Masks
    head_groups: int = 1
    sinks: Tensor | None = None  # (H,), a logit per head

    @property
    def reach(self) -> int:
        return self.width if self.window is None else window_reach(self.window, self.width)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Map query (S, H, Q, K), key and value (S, H_kv, L, K) to (S, H, Q, K). With dropout, heads are not grouped:
        the recomputation in backward would draw other random numbers."""
        if self.head_groups > 1 and not self.dropout and torch.is_grad_enabled() and query.requires_grad:
            query, key, value = as_autocast(query, key, value)
            return by_head_groups(query, key, value, self.of_heads, self.head_groups)
        return self.attend(query, key, value)

    def of_heads(self, query: Tensor, key: Tensor, value: Tensor, heads: slice) -> Tensor:
        """Compute attention for the given heads, which are `heads` of the layer's query heads."""
        causal = self if self.sinks is None else replace(self, sinks=self.sinks[heads])
        return causal.attend(query, key, value)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute attention for all given heads at once, with the shapes of `__call__`."""
        queries, keys = query.shape[2], key.shape[2]
        if self.window is not None and self.window < keys:
            return self.windowed(query, key, value)
        if queries in (1, keys):  # the last token attends to all
            return self.fused(query, key, value, None, is_causal=queries > 1)
        query, key, value = as_autocast(query, key, value)
        return self.fused(query, key, value, lower_right(queries, keys, query), is_causal=False)

    def windowed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute windowed attention by blocks of queries, each against the keys within its reach."""
        before, blocks = key.shape[2] - query.shape[2], tokens_split(query, window_block(self.width))
        near = []
        for block in blocks:
            near.append((max(0, before - self.reach), before + block.shape[2]))
            before += block.shape[2]
        results = [
            self.fused(block, keys, values, self.window_bias(block.shape[2], keys.shape[2], block), is_causal=False)
            for block, keys, values in zip(blocks, parts(key, near), parts(value, near), strict=True)
        ]
        return tokens_cat(results)

    def window_bias(self, queries: int, keys: int, like: Tensor) -> Tensor:
        """Return the additive mask (Q, L) of a block in the dtype of `like`, cut from the mask shared by all blocks."""
        shift = self.reach - (keys - queries)
        cut = self.window_mask(like)[:queries, shift : shift + keys]
        return cut if shift % ALIGNED == 0 else F.pad(cut, (0, -keys % ALIGNED))[:, :keys]

    def window_mask(self, like: Tensor) -> Tensor:
        """Return the mask of a full block and all keys within its reach, made once for all layers."""
        name = (self.window, like.dtype)
        if name not in self.masks:
            block = window_block(self.width)
            hidden = ~window_mask(block, self.reach + block, self.window or self.width, like.device)
            made = like.new_zeros(block, -(-hidden.shape[1] // ALIGNED) * ALIGNED)
            self.masks[name] = made[:, : hidden.shape[1]].masked_fill_(hidden, -torch.inf)
        return self.masks[name]

    def fused(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Call torch's fused attention, with keys and values repeated if its kernel does not support shared heads."""
        if self.sinks is not None:
            return attention_with_sinks(query, key, value, self.sinks[:, None], mask, is_causal, self.scaling)
        groups, masked = query.shape[1] // key.shape[1], mask is not None and not isinstance(mask, CausalBias)
        if groups > 1 and not shares_key_heads(query.device, query.dtype, masked, query.shape[3]):
            key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, dropout_p=self.dropout, scale=self.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def each_prompt_once(query: Tensor, key: Tensor, value: Tensor, prompts: Sequence[Sequence[int]],
                     causal: Causal) -> Tensor:
    """Run attention once per prompt and once per completion; a completion attends to its prompt's keys and its own."""
    families = [(0, own + others[0]) if len(others) == 1 else (own, *others) for own, *others in prompts]
    sizes = [length for lengths in families for length in lengths if length]
    pieces = zip(*(tokens_split(heads, sizes) for heads in (query, key, value)), strict=True)
    results = []
    for own, *others in families:
        keys: list[Tensor] = []
        values: list[Tensor] = []
        if own:
            asked, key, value = next(pieces)
            ranges = [(0, own), *[(max(0, own - causal.reach), own)] * len(others)]
            (key, *keys), (value, *values) = parts(key, ranges), parts(value, ranges)
            results.append(causal(asked, key, value))
        for number in range(len(others)):
            asked, key, value = next(pieces)
            if own:
                key, value = tokens_cat([keys[number], key]), tokens_cat([values[number], value])
            results.append(causal(asked, key, value))
    return tokens_cat(results).transpose(1, 2)


def tokens_split(heads: Tensor, sizes: int | Sequence[int]) -> Sequence[Tensor]:
    """Split (S, H, T, K) along T so that gradients are concatenated in the stored layout (S, T, H, K)."""
    pieces = heads.transpose(1, 2).split(sizes if isinstance(sizes, int) else list(sizes), 1)
    return [piece.transpose(1, 2) for piece in pieces]


def tokens_cat(heads: Sequence[Tensor]) -> Tensor:
    """Concatenate parts along T to (S, H, T, K), stored as (S, T, H, K)."""
    return heads[0] if len(heads) == 1 else torch.cat([part.transpose(1, 2) for part in heads], 1).transpose(1, 2)


class PartsFunction(torch.autograd.Function):
    """Returns views of (S, H, T, K) along T. Where views overlap, gradients are summed in order, in float32."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranges: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        ctx.ranges, ctx.shape = ranges, whole.shape
        ctx.set_materialize_grads(False)
        return tuple(whole[:, :, start:end] for start, end in ranges)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        summed = [(grad, part) for grad, part in zip(grads, ctx.ranges, strict=True) if grad is not None]
        if not summed:
            return None, None
        rows, heads, tokens, size = ctx.shape
        dtype = summed[0][0].dtype
        total = summed[0][0].new_zeros(rows, tokens, heads, size, dtype=torch.promote_types(dtype, torch.float32))
        for grad, (start, end) in summed:
            total[:, start:end] += grad.transpose(1, 2)
        return total.transpose(1, 2).to(dtype), None


def parts(whole: Tensor, ranges: list[tuple[int, int]]) -> tuple[Tensor, ...]:
    """Return views (S, H, end - start, K) of (S, H, T, K), one for each range."""
    if ranges == [(0, whole.shape[2])]:
        return (whole,)
    views: tuple[Tensor, ...] = PartsFunction.apply(whole, ranges)
    return views


def lower_right(queries: int, keys: int, like: Tensor) -> Tensor:
    """Return the causal mask of the last Q of L tokens: (Q, L) on the CPU, a `CausalBias` without tensor on a GPU."""
    if like.device.type == "cuda":
        return causal_lower_right(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(keys - queries)


def window_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return (Q, L) bool: true where each of the last Q of L tokens attends, to itself and `window` - 1 before it."""
    seen = torch.arange(keys, device=device, dtype=torch.int32)
    behind = seen[keys - queries :, None]
    return (seen <= behind) & (seen > behind - window)


def shares_key_heads(device: torch.device, dtype: torch.dtype, masked: bool, size: int) -> bool:
    """Return whether torch's fused attention accepts fewer key heads than query heads. On a GPU only the flash kernel
    does, which needs sm_80, 16 bits, no mask and heads of at most 256; without it torch would compute the (T, T)
    scores."""
    if device.type != "cuda":
        return True
    flash = dtype != torch.float32 and not masked and size <= 256
    return flash and torch.cuda.get_device_capability(device) >= (8, 0)
