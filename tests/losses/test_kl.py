"""KL estimates per token: what they are at a point, and what they and their gradients are on average."""

import math

import pytest
import torch
from naive_loss import close, kl_of
from torch import Tensor

from lowmem_grpo.losses.kl import KL_ESTIMATORS


def distributions() -> tuple[Tensor, Tensor]:
    """Logits (V,) of a policy, with gradient, and log-probabilities (V,) of a reference."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), reference.log_softmax(-1)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_an_estimate_and_its_gradient_are_the_formula(name: str) -> None:
    logp = torch.tensor([-1.0, -0.2, -3.0, -0.7], dtype=torch.float64).requires_grad_()
    ref = torch.tensor([-1.5, -0.1, -1.0, -0.7], dtype=torch.float64)
    expected = torch.stack([kl_of(name, one, other) for one, other in zip(logp, ref, strict=True)])
    found = KL_ESTIMATORS[name](logp, ref)
    close(found, expected)
    close(*(torch.autograd.grad(values.sum(), logp)[0] for values in (found, expected)))


def test_estimates_are_zero_at_the_reference_and_k2_and_k3_never_below() -> None:
    same = torch.linspace(-9, 0, 20)
    assert all(not estimate(same, same).any() for estimate in KL_ESTIMATORS.values())
    apart = same + torch.linspace(-3, 3, 20)
    assert (KL_ESTIMATORS["k2"](same, apart) >= 0).all() and (KL_ESTIMATORS["k3"](same, apart) >= 0).all()


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_an_unbiased_estimate_is_the_kl_on_average(name: str) -> None:
    logits, ref = distributions()
    logp = logits.log_softmax(-1).detach()
    close((logp.exp() * KL_ESTIMATORS[name](logp, ref)).sum(), (logp.exp() * (logp - ref)).sum())


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_weighed_by_the_ratio_the_gradient_is_the_kls_own(name: str) -> None:
    logits, ref = distributions()
    logp = logits.log_softmax(-1)
    weighed = (logp.detach().exp() * (logp - logp.detach()).exp() * KL_ESTIMATORS[name](logp, ref)).sum()
    exact = (logp.exp() * (logp - ref)).sum()
    close(*(torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (weighed, exact)))


def test_k2_as_a_loss_has_the_gradient_of_k1_in_the_reward_and_k1_has_none() -> None:
    logits, ref = distributions()
    logp = logits.log_softmax(-1)
    chance, cost = logp.detach().exp(), (logp - ref).detach()

    def gradient(per_token: Tensor) -> Tensor:
        return torch.autograd.grad((chance * per_token).sum(), logits, retain_graph=True)[0]

    close(gradient(KL_ESTIMATORS["k2"](logp, ref)), gradient(cost * logp))
    close(gradient(KL_ESTIMATORS["k1"](logp, ref)), torch.zeros(7).double())
    assert math.isclose(chance.sum().item(), 1)
