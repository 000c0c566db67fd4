"""The accuracy rule of every kernel, and running Triton code in its interpreter."""

import os
from typing import Any

import pytest
import torch
from card import HALVES, gpu
from torch import Tensor

from lowmem_grpo.kernels.lora import LoRA

# tests/conftest.py turns the interpreter on where there is no card. It computes bfloat16 wrongly: float32 only.
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for the card here")
# Where a kernel's rounding to 16 bits is seen: float16 in the interpreter, both on a card.
IN_16_BITS = [pytest.param("cpu", torch.float16, marks=interpreted),
              *(pytest.param("cuda", dtype, marks=gpu) for dtype in HALVES)]
# What one rounding changes of the largest value; of float32, a sum in another order.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def in_float64(value: Any) -> Any:
    """The same in float64: a tensor, a LoRA pair or a dict of them; what holds no floating numbers stays."""
    if isinstance(value, dict):
        return {name: in_float64(one) for name, one in value.items()}
    if isinstance(value, LoRA):
        return LoRA(in_float64(value.a), in_float64(value.b), value.scale)
    if not torch.is_tensor(value) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def assert_as_accurate(name: str, ours: Tensor, reference: Tensor, truth: Tensor, epsilon: float) -> None:
    """Our largest error against float64 `truth` is at most the reference's, plus `epsilon` of the largest value."""
    assert ours.shape == truth.shape, f"{name}: got shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    if truth.numel() == 0:
        return
    error, allowed = (values.detach().double() - truth for values in (ours, reference))
    limit = allowed.abs().max() + epsilon * truth.abs().max()
    assert error.abs().max() <= limit, f"{name}: error {error.abs().max():.3e}, allowed {limit:.3e}"
