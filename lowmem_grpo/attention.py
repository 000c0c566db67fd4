"""Attention over packed sequences and over a growing cache, through transformers' registry of attention functions.

    packed   one row of T tokens holds S sequences, which may share prompts; each attends to itself alone. No (T, T)
             mask is ever made: the sequences are laid side by side, (S, max_seqlen), and plain causal attention runs
             over them. What is right of a sequence's end is never attended to by the sequence, so no mask is needed
             for it either.
    cached   one new token a row against the cache; the query heads that share a key head are folded into its query
             axis, so that keys and values are read where they lie instead of being repeated.
    other    transformers' own "sdpa".

Models are loaded with `attn_implementation=NAME`. Sliding windows are honoured in all three.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lowmem_grpo.types import MicroBatch

NAME = "lowmem_grpo"
CHANGES = {  # what a model may hand over that changes the result, and that is not in any of the three forms
    "softcap": "logit soft-capping", "s_aux": "sinks", "sinks": "sinks", "position_bias": "a position bias",
    "alibi": "ALiBi", "head_mask": "a head mask",
}


@dataclass
class PackedLayout:
    """Where packed tokens lie when S sequences are laid side by side in width W = max_seqlen."""

    sources: Tensor  # (S * W,) int64, index into T
    places: Tensor  # (T,) int64, index into S * W
    num_sequences: int
    width: int
    calls: int = 0  # of attention with this layout, as many as there are layers after a forward pass

    @classmethod
    def of(cls, batch: MicroBatch) -> "PackedLayout":
        return cls(batch.sources, batch.places, len(batch.cu_seqlens) - 1, batch.max_seqlen)

    def spread(self, packed: Tensor) -> Tensor:
        """(1, H, T, K) to (S, H, W, K); right of a sequence's end stands any of its tokens."""
        if self.num_sequences == 1:  # it lies as it should
            return packed
        heads, size = packed.shape[1], packed.shape[3]
        side_by_side = packed[0].transpose(0, 1).index_select(0, self.sources)
        return side_by_side.view(self.num_sequences, self.width, heads, size).transpose(1, 2)

    def gather(self, side_by_side: Tensor) -> Tensor:
        """(S, H, W, K) to (1, T, H, K)."""
        if self.num_sequences == 1:
            return side_by_side.transpose(1, 2)
        flat = side_by_side.transpose(1, 2).reshape(-1, side_by_side.shape[1], side_by_side.shape[3])
        return flat.index_select(0, self.places)[None]


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    packed: PackedLayout | None = None, cached: bool = False, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, softcap: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:
    """Dispatch to one of the three forms; query (B, H, Q, K), key and value (B, H_kv, L, K), result (B, Q, H, K)."""
    given = kwargs | {"softcap": softcap}
    if wanted := [words for name, words in CHANGES.items() if given.get(name) is not None]:
        raise ValueError(f"attention with {' and '.join(wanted)} is not supported; load a model without it")
    with without_cudnn():
        if packed is not None:
            packed.calls += 1
            return packed_attention(query, key, value, packed, scaling, dropout, sliding_window), None
        if cached and query.shape[2] == 1:
            return cached_attention(query, key, value, attention_mask, scaling, sliding_window), None
        if cached and sliding_window is not None and attention_mask is not None:
            attention_mask = attention_mask & window_mask(key.shape[2], sliding_window, key.device)[-query.shape[2] :]
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Inside, torch's attention takes its flash form in the place of cuDNN's, which it prefers on sm_90. cuDNN makes
    a plan for each new shape, and here nearly every call has one; and importing vLLM turns it off for the process, so
    that the kernels of a run would depend on its engine."""
    was = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None, dropout: float,
    sliding_window: int | None,
) -> Tensor:
    """Causal attention within each packed sequence, result (1, T, H, K)."""
    windowed = sliding_window is not None and sliding_window < layout.width
    mask = window_mask(layout.width, sliding_window, query.device) if windowed and sliding_window else None
    query, key, value = layout.spread(query), layout.spread(key), layout.spread(value)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and not shares_key_heads(query.device, query.dtype, mask is not None):
        key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return layout.gather(out)


def shares_key_heads(device: torch.device, dtype: torch.dtype, masked: bool) -> bool:
    """Whether a fused form of torch's attention takes fewer key heads than query heads. The flash form does; on a card
    it needs sm_80, 16 bits and no mask. The other fused form does not: torch would make the (T, T) scores instead."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0) and dtype != torch.float32 and not masked


def cached_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """One query a row: (B, H, 1, K) against (B, H_kv, L, K); rows are right-aligned, so a window is the last keys."""
    rows, heads, _, size = query.shape
    if sliding_window is not None and sliding_window < key.shape[2]:
        key, value = key[:, :, -sliding_window:], value[:, :, -sliding_window:]
        mask = mask[..., -sliding_window:] if mask is not None else None
    folded = query.view(rows, key.shape[1], heads // key.shape[1], size)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(rows, 1, heads, size)


def window_mask(width: int, sliding_window: int, device: torch.device) -> Tensor:
    """(W, W) bool: causal, and at most `sliding_window` tokens back, oneself included."""
    position = torch.arange(width, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < sliding_window)


def uses_registry(model: Any) -> bool:
    """Whether a transformers model takes its attention from the registry. The flag has an underscore, though every
    model sets it: checked on transformers 5.17 to 5.19, and a test fails where it goes away."""
    return bool(getattr(model, "_supports_attention_backend", False))


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
