"""Weights and metrics of a step where they are extreme, and means over micro-batches, weighted by their tokens."""

import math

import pytest
import torch
from tables import every_row

from lowmem_grpo.losses.loss_metrics import effective_sample_share
from lowmem_grpo.losses.loss_types import LossTokens, vespo_phi
from lowmem_grpo.losses.objective import Reducer


@every_row(("weights", "share"), [
    ([2.0, 2.0, 2.0], 1.0), ([3.0, 1.0], 0.8), ([0.0, 2.0], 0.5), ([0.0, 0.0], 0.0), ([1e30, 1e-30], 0.5),
    ([1e-30, 1e-30], 1.0), ([], math.nan), ([math.nan, 1.0], math.nan),
])
def test_the_share_of_samples_in_effect_neither_overflows_nor_vanishes(weights: list[float], share: float) -> None:
    assert effective_sample_share(torch.tensor(weights)) == pytest.approx(share, nan_ok=True)


def test_vespos_weight_of_two_thousand_tokens_loses_no_digits_in_float32() -> None:
    torch.manual_seed(3)
    log_ratio = 0.02 * torch.randn(2000)
    options = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    ids, lengths = torch.zeros(2000, dtype=torch.int64), torch.tensor([2000])
    tokens = LossTokens(log_ratio, log_ratio, log_ratio, torch.ones(2000), ids, lengths, log_ratio.exp(), False)
    w = math.fsum(log_ratio.tolist()) + math.fsum(math.log(value) for value in log_ratio.exp().tolist())
    exact = math.exp(2.0 * w + 3.0 * (1 - math.exp(w)))
    found = vespo_phi(tokens, options)
    assert found.dtype == torch.float32 and found.tolist() == pytest.approx([exact] * 2000, rel=2**-23)


@every_row(("added", "expected"), [
    ([({"kl": 1.0}, 3), ({"kl": 5.0}, 1)], {"kl": 2.0}),
    ([({"low/min": low, "high/max": high}, 10) for low, high in ((1.0, 5.0), (0.5, 9.0), (2.0, 3.0))],
     {"low/min": 0.5, "high/max": 9.0}),
    ([({"entropy": 1.0}, 2), ({"entropy": 4.0, "kl": 3.0}, 1)], {"entropy": 2.0, "kl": 3.0}),  # of those that have it
    ([], {}), ([({"kl": 0.0}, 0)], {"kl": 0.0}), ([({"kl": math.nan}, 0), ({"kl": 3.0}, 2)], {"kl": 3.0}),
])
def test_means_are_weighted_by_tokens_and_extremes_are_not(
    added: list[tuple[dict[str, float], float]], expected: dict[str, float]
) -> None:
    reducer = Reducer()
    for metrics, weight in added:
        reducer.add({name: torch.tensor(value) for name, value in metrics.items()}, weight)
    assert reducer.result() == pytest.approx(expected)
