"""What the table of loss types alone decides; test_policy_loss.py compares every type with loops in float64."""

import math

import pytest
import torch

from lowmem_grpo.losses.loss_types import LossTokens, vespo_phi


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
