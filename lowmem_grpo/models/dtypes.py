"""The dtype that a model computes in on this machine."""

from typing import Any

import torch

from lowmem_grpo.memory.families import check_float16


def compute_dtype(dtype: torch.dtype | str | None) -> torch.dtype:
    """The dtype to load in: the given one, otherwise bfloat16 or float16 depending on the card, float32 on the CPU."""
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype, dtype)
    if isinstance(dtype, torch.dtype):
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype is {dtype}; allowed are float32, bfloat16 and float16")
        return dtype
    if dtype not in (None, "auto"):
        raise ValueError(f'dtype is {dtype!r}; allowed are float32, bfloat16, float16, "auto" and None')
    if not torch.cuda.is_available():
        return torch.float32
    return torch.bfloat16 if is_bfloat16_supported() else torch.float16


def check_dtype(config: Any, *dtypes: torch.dtype | None) -> None:
    """ValueError where a model of this config would compute in float16 and cannot."""
    if torch.float16 in dtypes:
        check_float16(config)


def is_bfloat16_supported() -> bool:
    """Return whether the card computes in bfloat16 (sm_80 and later); True on the CPU, where every dtype works.

    Older cards can store it, but they emulate some operations slowly, and Triton does not compile for it there.
    """
    return torch.cuda.is_bf16_supported(including_emulation=False) if torch.cuda.is_available() else True
