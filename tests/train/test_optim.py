"""The optimizer's numbers: the norms of gradients by group."""

import pytest
import torch

from lowmem_grpo.train.optim import gradient_norms


def test_a_trained_parameter_that_is_no_adapters_is_in_the_norms() -> None:
    parameters = {name: torch.nn.Parameter(torch.zeros(3)) for name in (
        "layers.0.q_proj.lora_A.default.weight", "layers.1.q_proj.lora_B.default.weight", "norm.weight", "unused")}
    for number, parameter in enumerate(list(parameters.values())[:3]):
        parameter.grad = torch.full((3,), float(number + 1))
    total, metrics = gradient_norms(parameters)
    expected = {"grad_norm": 42**0.5, "grad_norm/q_proj": 15**0.5, "grad_norm/other": 27**0.5}
    assert metrics == pytest.approx(expected, rel=1e-3)
    assert total.item() == pytest.approx(42**0.5, rel=1e-3)
