"""The rows that the transformers engine decodes together, and their key-value cache."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_grpo.engines.kv_cache import GrowingCache, Piece, right_aligned


@dataclass
class Decode:
    """The B rows still in the batch. `real` marks the cache places that hold a token, not left padding."""

    cache: GrowingCache
    rows: Tensor  # (B,) which output row
    tokens: Tensor  # (B,) the last token drawn
    alive: Tensor  # (B,) bool
    real: Tensor  # (B, L) bool
    positions: Tensor  # (B,) of the last token in the cache
    routes: Tensor | None = None  # (B, S, layers, k) of the tokens fed last, where the model has experts

    @classmethod
    def of(cls, rows: Tensor, cache: GrowingCache | None = None, lengths: Tensor | None = None) -> "Decode":
        """Rows whose caches hold `lengths` tokens (B,), which end at the right edge; without a cache none."""
        lengths = torch.zeros_like(rows) if lengths is None else lengths
        width = 0 if cache is None else cache.get_seq_length()
        real = torch.arange(width, device=rows.device) >= width - lengths[:, None]
        alive = torch.ones_like(rows, dtype=torch.bool)
        return cls(GrowingCache() if cache is None else cache, rows, rows, alive, real, lengths - 1)

    @classmethod
    def joined(cls, states: list["Decode"], give: bool = False) -> "Decode":
        """The rows of all states in one. Those of states that `give` their caches away are unfinished; empty places on
        their left are left out, and there is room for some steps."""
        if len(states) == 1:
            return states[0]
        lengths = [state.real.shape[1] for state in states]
        widths = [int(state.positions.max()) + 1 for state in states] if give else lengths
        pieces = [Piece(state.cache, slice(0, len(state.rows)), length - width, length)
                  for state, length, width in zip(states, lengths, widths, strict=True)]
        most = max(widths)
        real = [F.pad(state.real[:, length - width :], (most - width, 0))
                for state, length, width in zip(states, lengths, widths, strict=True)]
        return cls(
            right_aligned(pieces, most, most // 8 if give else 0, give), torch.cat([state.rows for state in states]),
            torch.cat([state.tokens for state in states]), torch.cat([state.alive for state in states]),
            torch.cat(real), torch.cat([state.positions for state in states]),
        )

    def select(self, keep: Tensor) -> None:
        """Keep only these rows (R,), or repeat them."""
        self.cache.batch_select_indices(keep)
        self.rows, self.tokens, self.alive = self.rows[keep], self.tokens[keep], self.alive[keep]
        self.real, self.positions = self.real[keep], self.positions[keep]

    def compact(self) -> Tensor:
        """Drop the rows that have finished; returns where the others were (R,)."""
        kept = self.alive.nonzero().squeeze(-1)
        self.select(kept)
        return kept
