"""Attention over packed sequences and over a growing cache, through transformers' registry of attention functions.

    packed   one row of T tokens holds S sequences, which may share prompts. Each attends only to itself, and no
             (T, T) mask is ever made (`packed_attention`).
    cached   one new token in each row against the cache. The query heads that share a key head are folded into its
             query axis, so that keys and values are read in place instead of being repeated.
    other    transformers' own "sdpa".

Models are loaded with `attn_implementation=NAME`. All three forms respect sliding windows and sinks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lowmem_grpo.memory.cutting import ALIGNED
from lowmem_grpo.models.attention_sinks import attention_with_sinks, fused_with_lse
from lowmem_grpo.models.packed_attention import PackedLayout, packed_attention, window_mask

NAME = "lowmem_grpo"
LONG, MOST_PARTS = 2048, 8  # keys from which a small batch reads them in parts, and the most parts
CHANGES = {  # arguments that change the result and that none of the three forms computes
    "softcap": "logit soft-capping", "sinks": "sinks that are not its s_aux", "position_bias": "a position bias",
    "alibi": "ALiBi", "head_mask": "a head mask", "indices": "a choice of keys",
}
# cuDNN's attention builds a plan for each new shape, and vLLM disables it too. Once for the process, because a thread
# that samples and one that trains would undo each other's choice.
torch.backends.cuda.enable_cudnn_sdp(False)


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
              packed: PackedLayout | None = None, cached: bool = False, scaling: float | None = None,
              dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
              s_aux: Tensor | None = None, newest: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    """Attend with query (B, H, Q, K) to key and value (B, H_kv, L, K), with sinks `s_aux` (H,) if given; return (result
    (B, Q, H, K), None). ValueError for options that change the scores, such as ALiBi, and for sinks with dropout."""
    asked = kwargs | {"softcap": softcap}
    if wanted := [words for name, words in CHANGES.items() if asked.get(name) is not None]:
        raise ValueError(f"attention with {' and '.join(wanted)} is not supported; load a model without it")
    if s_aux is not None and dropout:
        raise ValueError(f"attention with sinks and a dropout of {dropout} is not supported; load the model with "
                         "attention_dropout=0.0 in its config")
    if packed is not None:
        if key.shape[2] != query.shape[2]:
            raise ValueError(f"attention of {query.shape[2]} tokens to {key.shape[2]} keys is not supported in "
                             "training, where a token has one key; load a model without other keys")
        packed.calls += 1
        return packed_attention(query, key, value, packed, scaling, dropout, sliding_window, s_aux), None
    if cached and query.shape[2] == 1:
        return cached_attention(query, key, value, attention_mask, scaling, sliding_window, newest, s_aux), None
    if cached and sliding_window is not None and attention_mask is not None:
        attention_mask = attention_mask & window_mask(query.shape[2], key.shape[2], sliding_window, key.device)
    if s_aux is not None:
        causal = attention_mask is None and query.shape[2] > 1
        if causal:  # a static cache has empty places behind the queries
            key, value = (heads[:, :, : query.shape[2]] for heads in (key, value))
        result = attention_with_sinks(query, key, value, s_aux[:, None], attention_mask, causal, scaling)
        return result.transpose(1, 2), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def cached_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None,
                     sliding_window: int | None, newest: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
    """Attend with one query per row, (B, H, 1, K), to keys (B, H_kv, L, K). Rows are right-aligned. The mask
    (B, 1, 1, L) is boolean, or has the dtype of the query and is added to the scores. If the cache has empty slots
    after the keys, `newest` (1,) is the index of the last key."""
    rows, heads, _, size = query.shape
    if newest is not None and mask is not None and sliding_window is not None and sliding_window < key.shape[2]:
        outside = torch.arange(key.shape[2], device=key.device) <= newest - sliding_window
        mask = mask.masked_fill(outside, False if mask.dtype == torch.bool else -torch.inf)
    elif sliding_window is not None and sliding_window < key.shape[2]:
        key, value = key[:, :, -sliding_window:], value[:, :, -sliding_window:]
        mask = mask[..., -sliding_window:] if mask is not None else None
    folded = query.view(rows, key.shape[1], heads // key.shape[1], size)
    logits = None if sinks is None else sinks.view(folded.shape[1:3])
    if mask is not None and mask.dtype == query.dtype and (parts := parts_of_keys(key)) > 1:
        return in_parts(folded, key, value, mask, scaling, parts, logits).reshape(rows, 1, heads, size)
    if logits is not None:
        out = attention_with_sinks(folded, key, value, logits, mask, False, scaling)
    else:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(rows, 1, heads, size)


def parts_of_keys(key: Tensor) -> int:
    """Return the number of parts in which to read the keys (B, H_kv, L, K). The GPU runs one block per row and key
    head, so a small batch is read in parts to occupy all multiprocessors."""
    if key.device.type != "cuda" or key.shape[2] < LONG or key.dtype == torch.float64:
        return 1
    blocks, parts = key.shape[0] * key.shape[1], 1
    while (parts < MOST_PARTS and blocks * parts < torch.cuda.get_device_properties(key.device).multi_processor_count
           and key.shape[2] % (2 * parts * ALIGNED) == 0):
        parts *= 2
    return parts


def in_parts(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, parts: int,
             sinks: Tensor | None = None) -> Tensor:
    """Return the attention (B, H, G, K) of query (B, H, G, K) over key and value (B, H, L, K) with the additive mask
    (B, 1, 1, L). The keys are split into `parts`, computed in parallel and merged by their log-sum-exp:

        out = sum_p exp(lse_p - lse) out_p,   lse = log sum_p exp(lse_p)

    `sinks` (H, G) are a part without values.
    """
    rows, heads, group, size = query.shape
    folded = query.reshape(rows * heads, 1, group, size).expand(-1, parts, -1, -1)
    keys, values = (part.flatten(0, 1).unflatten(1, (parts, -1)) for part in (key, value))
    added = mask.view(rows, 1, parts, 1, -1).expand(-1, heads, -1, -1, -1).flatten(0, 1).expand(-1, -1, group, -1)
    out, lse, _ = fused_with_lse(folded, keys, values, added, scaling)
    seen = (added[..., :1, :] > -torch.inf).any(-1, keepdim=True)  # a fully masked part has undefined output
    lse = lse[..., :group, None].where(seen, -torch.inf)
    if sinks is not None:
        lse = torch.cat([lse, sinks.to(lse.dtype).repeat(rows, 1)[:, None, :, None]], 1)
    share = lse.softmax(1)[:, :parts]
    return (out.where(seen, 0.0) * share).sum(1).to(query.dtype).view(rows, heads, group, size)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
