"""What a card can do, and the mark of tests that need one: conftest.py skips them, with the reason, where it cannot."""

from typing import Any

import pytest
import torch

HAS_CARD = torch.cuda.is_available()
CPU, CARD = torch.device("cpu"), torch.device("cuda:0")
gpu = pytest.mark.gpu
# The same assertions on both: what a test says is then proven on every machine, and a card is one more place.
DEVICES = [pytest.param(CPU, id="cpu"), pytest.param(CARD, id="cuda", marks=gpu)]
HALVES = [torch.bfloat16, torch.float16]


def why_skipped(values: dict[str, Any]) -> str | None:
    """Why a test marked `gpu`, with these parameters, cannot run on this machine; None where it can."""
    if not HAS_CARD:
        return "needs a CUDA device"
    wanted = any(value is torch.bfloat16 for value in values.values())
    if wanted and not torch.cuda.is_bf16_supported(including_emulation=False):
        return f"{torch.cuda.get_device_name()} does not compute in bfloat16"
    return None


def half() -> torch.dtype:
    """The 16-bit dtype that this machine's card computes in; bfloat16 where there is no card."""
    return torch.float16 if HAS_CARD and why_skipped({"dtype": torch.bfloat16}) else torch.bfloat16
