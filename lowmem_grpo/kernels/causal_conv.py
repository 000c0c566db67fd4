"""Causal depthwise convolution over packed runs, then SiLU, with the last inputs of a run as its state.

    y_t = silu(sum_j w_j x_{t - W + 1 + j}),  j = 0 .. W - 1;   x before a run's first token: the run's initial state

x, y (T, C), w (C, W), states (S, W - 1, C). A run's final state is the last W - 1 of what was put in, the initial state
among it. All runs, each with its state before it, go through one convolution.
"""

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_grpo.kernels import fla
from lowmem_grpo.kernels.varlen import VarlenSequences


def causal_conv(
    x: Tensor, weight: Tensor, runs: VarlenSequences, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y (T, C) and final states (S, W - 1, C); initial (S, W - 1, C), or None for zeros."""
    check(x, weight, runs, initial)
    before = weight.shape[1] - 1
    if initial is None:
        initial = x.new_zeros(len(runs.lengths), before, x.shape[1])
    if not runs.tokens:
        return x, initial
    stream = torch.cat([part for run in zip(initial, x.split(runs.lengths), strict=True) for part in run])
    ends = list(accumulate(length + before for length in runs.lengths))
    wide = fla.causal_conv(stream, weight) if fla.serve(x) else convolved(stream, weight)
    result = torch.cat([wide[end - length : end] for end, length in zip(ends, runs.lengths, strict=True)])
    return result, torch.stack([stream[end - before : end] for end in ends])


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """The same of x (T, C) as one run without a state, in plain torch."""
    wide = F.conv1d(x.T[None], weight[:, None], padding=weight.shape[1] - 1, groups=len(weight))
    return F.silu(wide[0, :, : len(x)].T)


def check(x: Tensor, weight: Tensor, runs: VarlenSequences, initial: Tensor | None) -> None:
    """ValueError where shapes do not fit."""
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or len(x) != runs.tokens:
        raise ValueError(f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}; expected (T, C) and (C, W) with the "
                         f"{runs.tokens} tokens of the runs")
    expected = (len(runs.lengths), weight.shape[1] - 1, x.shape[1])
    if initial is not None and initial.shape != expected:
        raise ValueError(f"initial is {tuple(initial.shape)}; expected {expected}: runs, W - 1, C")
