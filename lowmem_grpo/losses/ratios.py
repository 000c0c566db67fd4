"""Ratios of probabilities, from their logs: beyond 88 the exponential of a log is infinite in float32, and 0 * inf is
NaN, in a product as in its gradient. So a log is kept below that wherever only a bound of the ratio matters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lowmem_grpo.later import torch

if TYPE_CHECKING:
    from torch import Tensor


def log_limit(like: Tensor) -> float:
    """The log of a ratio that is surely finite in the dtype of `like`, and far above any bound."""
    return math.log(torch.finfo(like.dtype).max) - 1


def ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), for values without gradient: above 0 whatever the log is, since 0 means left out."""
    return log_ratio.clamp(min=-log_limit(log_ratio)).exp()


def held(log_ratio: Tensor, bounded: Tensor | bool) -> Tensor:
    """The log ratios, which where they overflow and are `bounded` by what follows become a constant without gradient.
    Where nothing bounds them, infinity stays: nothing else is true there."""
    limit = log_limit(log_ratio)
    return torch.where((log_ratio > limit) & bounded, limit, log_ratio)
