"""Metrics of a step's weights, where they are extreme."""

import math

import pytest
import torch
from tables import every_row

from lowmem_grpo.losses.loss_metrics import effective_sample_share


@every_row(("weights", "share"), [
    ([2.0, 2.0, 2.0], 1.0), ([3.0, 1.0], 0.8), ([0.0, 2.0], 0.5), ([0.0, 0.0], 0.0), ([1e30, 1e-30], 0.5),
    ([1e-30, 1e-30], 1.0), ([], math.nan), ([math.nan, 1.0], math.nan),
])
def test_the_share_of_samples_in_effect_neither_overflows_nor_vanishes(weights: list[float], share: float) -> None:
    assert effective_sample_share(torch.tensor(weights)) == pytest.approx(share, nan_ok=True)
