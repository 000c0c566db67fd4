"""Logits of some tokens against whole logits, with all that a config does to them."""

import pytest
import torch

from lowmem_grpo.models.policy import Head


@pytest.mark.parametrize("block", [3, 4096])
@pytest.mark.parametrize(("bias", "scale", "softcap"), [(False, 1.0, None), (True, 0.5, 3.0), (True, 2.0, None)])
def test_logits_and_gradients_are_those_of_the_whole_head(
    bias: bool, scale: float, softcap: float | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowmem_grpo.models.policy.HEAD_ROWS", block)
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 63, bias, dtype=torch.float64)
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    head = Head(linear, scale, softcap)
    places, tokens = torch.tensor([0, 0, 2, 4, 4, 4, 1]), torch.tensor([3, 62, 0, 7, 7, 1, 30])
    whole = hidden @ head.weight.T + (0.0 if head.bias is None else head.bias)
    whole = whole * scale if softcap is None else softcap * torch.tanh(whole * scale / softcap)
    expected = whole[places, tokens]
    found = head.logits_of(hidden, places, tokens)
    factors = torch.randn(7, dtype=torch.float64)
    [slope] = torch.autograd.grad((expected * factors).sum(), hidden)
    [got] = torch.autograd.grad((found * factors).sum(), hidden)
    assert torch.allclose(found, expected, rtol=1e-12) and torch.allclose(got, slope, rtol=1e-10)
    assert slope[3].norm() == 0 and slope.norm() > 0
