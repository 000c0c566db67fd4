"""What weights held as codes (NF4, FP8) have in common: they fill a place with their values."""

from typing import Protocol

import torch
from torch import Tensor


class Codes(Protocol):
    """A frozen (out, in) weight in codes."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...  # that its values have

    @property
    def device(self) -> torch.device: ...

    def fill(self, out: Tensor, row: int = 0, column: int = 0) -> None: ...


def dequantized(weight: Codes, out: Tensor | None) -> Tensor:
    """The values (out, in) in the weight's dtype, or written to `out` (contiguous, any floating dtype) where it is
    given. ValueError where that does not fit."""
    if out is None:
        out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    fits = out.shape == weight.shape and out.is_contiguous() and out.is_floating_point()
    if not fits or out.device != weight.device:
        raise ValueError(
            f"expected out {weight.shape}, contiguous, floating, on {weight.device}; got {tuple(out.shape)}, "
            f"strides {out.stride()}, {out.dtype} on {out.device}"
        )
    weight.fill(out)
    return out
