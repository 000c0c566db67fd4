"""Advantages from a critic and the critic's loss, against formulas in float64 that are written token by token."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from lowmem_grpo.losses.value_loss import explained_variance, gae, value_losses, whitened

NOTHING = torch.empty(0)


def numbers(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """sum_k (gamma lam)^k delta_{t+k}, from its definition."""
    after = [*values[1:], 0.0]
    deltas = [reward + gamma * following - value
              for reward, following, value in zip(rewards, after, values, strict=True)]
    return [math.fsum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


@pytest.mark.parametrize(("gamma", "lam"), [*product((1.0, 0.9), (0.0, 0.95, 1.0)), (0.0, 0.5)])
def test_advantages_would_not_be_the_discounted_sum_of_deltas(gamma: float, lam: float) -> None:
    rewards, values = numbers(9, 0), numbers(9, 1)
    expected = torch.tensor(by_hand(rewards.tolist(), values.tolist(), gamma, lam), dtype=torch.float64)
    torch.testing.assert_close(gae(rewards, values, gamma, lam), expected, rtol=1e-13, atol=1e-13)


def test_with_lam_1_the_return_would_not_be_the_discounted_reward_to_go() -> None:
    rewards, values = torch.tensor([0.0, 1.0, 0.0, 4.0]), numbers(4, 2)
    to_go = torch.tensor([1.0, 2.0, 2.0, 4.0], dtype=torch.float64)  # gamma 0.5: 4, then 0 + 2, 1 + 1, 0 + 1
    torch.testing.assert_close(gae(rewards, values, 0.5, 1.0) + values, to_go)



def test_long_rollouts_would_lose_digits_in_float32() -> None:
    rewards, values = numbers(4096, 3).float(), numbers(4096, 4).float()
    found = gae(rewards, values, 1.0, 1.0)
    assert found.dtype == torch.float64
    assert found[0].item() == pytest.approx(math.fsum(rewards.tolist()) - values[0].item(), abs=1e-10)


def test_a_rollout_of_no_tokens_or_of_one_would_fail() -> None:
    assert gae(NOTHING, NOTHING).shape == (0,)
    assert gae(torch.tensor([2.0]), torch.tensor([0.5])).tolist() == [1.5]


def test_a_nan_would_reach_later_tokens() -> None:
    rewards, values = torch.zeros(4), torch.tensor([1.0, math.nan, 2.0, 3.0])
    assert gae(rewards, values).isnan().tolist() == [True, True, False, False]


# Value loss


def test_the_loss_and_its_gradient_would_not_be_the_larger_of_both_squares() -> None:
    old, returns, clip = torch.zeros(6).double(), torch.tensor([1.0, 1.0, -1.0, 1.0, 0.3, 0.05]).double(), 0.2
    values = torch.tensor([0.9, 0.1, 0.9, -0.9, 0.3, 0.2]).double().requires_grad_()
    losses, decides = value_losses(values, old, returns, clip)
    for value, before, target, loss, bounded in zip(values, old, returns, losses, decides, strict=True):
        inside = min(max(value.item(), before.item() - clip), before.item() + clip)
        plain, of_bound = (value.item() - target.item()) ** 2 / 2, (inside - target.item()) ** 2 / 2
        assert loss.item() == pytest.approx(max(plain, of_bound), abs=1e-15)
        assert bounded.item() == (of_bound > plain)
        slope = 0.0 if of_bound > plain else value.item() - target.item()
        assert torch.autograd.grad(loss, values, retain_graph=True)[0].sum().item() == pytest.approx(slope, abs=1e-15)
    assert decides.any() and not decides.all()


def test_without_a_bound_the_loss_would_not_be_half_the_square() -> None:
    values, returns = numbers(5, 5).requires_grad_(), numbers(5, 6)
    losses, decides = value_losses(values, torch.full((5,), 9.0), returns)
    torch.testing.assert_close(losses, (values - returns).square() / 2)
    assert not decides.any() and torch.autograd.gradcheck(lambda x: value_losses(x, x.detach(), returns)[0], values)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_a_return_that_is_not_finite_would_spoil_the_gradient(bad: float, clip: float | None) -> None:
    values = torch.tensor([1.0, 2.0, 3.0]).requires_grad_()
    old = torch.tensor([1.0, bad, 2.9])
    losses, decides = value_losses(values, old, torch.tensor([0.0, bad, 1.0]), clip)
    assert losses.dtype == torch.float32 and losses.tolist()[::2] == [0.5, 2.0] and losses[1] == 0 and not decides[1]
    assert torch.autograd.grad(losses.sum(), values)[0].tolist() == [1.0, 0.0, 2.0]


def test_values_that_explode_would_give_nan_instead_of_a_large_loss() -> None:
    values = torch.tensor([1e15, -1e15]).requires_grad_()
    losses, _ = value_losses(values, torch.zeros(2), torch.zeros(2), 0.2)
    assert losses.isfinite().all() and torch.autograd.grad(losses.sum(), values)[0].isfinite().all()


def test_no_tokens_would_fail() -> None:
    losses, decides = value_losses(NOTHING, NOTHING, NOTHING, 0.2)
    assert losses.shape == decides.shape == (0,) and whitened(NOTHING).shape == (0,)
    assert math.isnan(explained_variance(NOTHING, NOTHING))


# Whitening and explained variance


@pytest.mark.parametrize("center", [True, False])
def test_whitened_values_would_count_masked_or_broken_ones(center: bool) -> None:
    values = torch.tensor([1.0, 100.0, 3.0, math.nan, 8.0, math.inf])
    found = whitened(values, torch.tensor([True, False, True, True, True, True]), center)
    mean, std = 4.0, math.sqrt((9 + 1 + 16) / 2)
    expected = [(value - mean) / (std + 1e-4) + (0 if center else mean) for value in (1.0, 3.0, 8.0)]
    assert found[[0, 2, 4]].tolist() == pytest.approx(expected, rel=1e-12)
    assert found.isnan().tolist() == [False, True, False, True, False, True]


def test_equal_values_would_be_blown_up_to_noise() -> None:
    assert whitened(torch.full((7,), 0.1)).abs().max() < 1e-9
    assert whitened(torch.tensor([5.0, math.inf])).nan_to_num(9).tolist() == [0.0, 9.0]


def test_explained_variance_would_not_be_that_of_the_definition() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert explained_variance(returns, returns) == 1 and explained_variance(torch.zeros(4), returns) == 0
    assert explained_variance(returns + 5, returns) == 1  # a constant error leaves no variance
    values = torch.tensor([0.0, 3.0, 3.0, 4.0])  # errors 1, -1, 0, 2: variance 1.25; of the returns 3.5
    assert explained_variance(values, returns) == pytest.approx(1 - 1.25 / 3.5, rel=1e-12)
    assert explained_variance(torch.tensor([0.0, 3.0, math.nan, 3.0, 4.0]), torch.tensor([1.0, 2.0, 9.0, 3.0, 6.0])
                              ) == pytest.approx(1 - 1.25 / 3.5, rel=1e-12)
    assert math.isnan(explained_variance(values, torch.ones(4)))
