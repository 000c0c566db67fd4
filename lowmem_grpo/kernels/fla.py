"""The kernels of flash-linear-attention, if it is installed, for 16-bit tensors on a card.

The kernels take no runs without tokens. The names and the layout of states are those of version 0.6.0.
"""

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.varlen import VarlenSequences

PACKAGE, OLDEST = "flash-linear-attention", (0, 6)


@cache
def installed() -> str | None:
    """Return the package's version; None if it is not installed, or older than the functions called here."""
    try:
        release = version(PACKAGE)
    except PackageNotFoundError:
        return None
    return release if tuple(int(part) for part in release.split(".")[:2]) >= OLDEST else None


def serve(x: Tensor) -> bool:
    """Return whether the package's kernels compute for x: on a card, in 16 bits, if it is installed."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and installed() is not None


def describe(x: Tensor) -> str:
    """Return, in words, the kernels that the gated delta rule uses for x."""
    if serve(x):
        return f"the kernels of {PACKAGE} {installed()}"
    wish = f"; {PACKAGE} {OLDEST[0]}.{OLDEST[1]} or later is faster" if x.is_cuda and installed() is None else ""
    return f"plain torch{wish}"


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, runs: VarlenSequences, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.delta_rule` with the package's kernels: results (T, H, V) and the states after each run."""
    rule: Any = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    states = list(zip(initial.split(1), runs.lengths, strict=True))
    result, final = rule(query[None], key[None], value[None], g[None], beta[None], output_final_state=True,
                         initial_state=torch.cat([state for state, length in states if length]),
                         use_qk_l2norm_in_kernel=True, cu_seqlens=runs.filled.cu_seqlens)
    new = iter(final.split(1))
    return result[0], torch.cat([next(new) if length else state for state, length in states])


def causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Return silu of the causal depthwise convolution of x (T, C) with weight (C, W), taken as one sequence."""
    conv: Any = import_module("fla.modules.causal_conv1d").causal_conv1d
    return conv(x[None], weight, activation="silu")[0][0]
