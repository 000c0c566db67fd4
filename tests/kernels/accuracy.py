"""The accuracy rule of every kernel, and running Triton code in its interpreter."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

HAS_CARD = torch.cuda.is_available()
# tests/conftest.py turns the interpreter on where there is no card. It computes bfloat16 wrongly: float32 only.
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for the card here")


def gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that needs a card, and skips it with a reason where there is none."""
    return pytest.mark.gpu(pytest.mark.skipif(not HAS_CARD, reason="needs a CUDA device")(test))


def assert_as_accurate(name: str, ours: Tensor, reference: Tensor, truth: Tensor, epsilon: float) -> None:
    """Our largest error against float64 `truth` is at most the reference's, plus `epsilon` of the largest value."""
    assert ours.shape == truth.shape, f"{name}: got shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    if truth.numel() == 0:
        return
    error, allowed = (values.detach().cpu().double() - truth.cpu() for values in (ours, reference))
    limit = allowed.abs().max() + epsilon * truth.abs().max().cpu()
    assert error.abs().max() <= limit, f"{name}: error {error.abs().max():.3e}, allowed {limit:.3e}"
