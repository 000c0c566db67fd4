"""Advantages against numbers worked out by hand and against TRL's formula."""

import pytest
import torch

from lowmem_grpo.advantages import combine_rewards, group_advantages

NAN = float("nan")
REWARDS = torch.tensor([[1.0, 3.0], [0.0, 4.0]])  # means 2 and 2; std sqrt(2) and sqrt(8); of the batch sqrt(10 / 3)


@pytest.mark.parametrize(("scale", "expected"), [
    ("none", [[-1.0, 1.0], [-2.0, 2.0]]),
    ("group", [[-1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4)], [-2 / (8**0.5 + 1e-4), 2 / (8**0.5 + 1e-4)]]),
    ("batch", [[-1 / ((10 / 3) ** 0.5 + 1e-4), 1 / ((10 / 3) ** 0.5 + 1e-4)],
               [-2 / ((10 / 3) ** 0.5 + 1e-4), 2 / ((10 / 3) ** 0.5 + 1e-4)]]),
])
def test_hand_worked_numbers(scale: str, expected: list[list[float]]) -> None:
    torch.testing.assert_close(group_advantages(REWARDS, scale), torch.tensor(expected))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_trls_formula(scale: str) -> None:
    rewards = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, std = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
    divisor = {"group": std + 1e-4, "batch": rewards.std() + 1e-4, "none": 1.0}[scale]
    torch.testing.assert_close(group_advantages(rewards, scale), (rewards - mean) / divisor)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("size", [3, 7])
def test_equal_rewards_give_exactly_zero(scale: str, value: float, size: int) -> None:
    rewards = torch.tensor([[value] * size, list(range(size))], dtype=torch.float32)
    advantages = group_advantages(rewards, scale)
    assert not advantages[0].any() and advantages[1].any()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_missing_rewards_are_left_out_and_get_zero(scale: str) -> None:
    rewards = torch.tensor([[1.0, NAN, 3.0], [0.0, 4.0, NAN]])
    advantages = group_advantages(rewards, scale)
    assert advantages[0, 1] == 0 and advantages[1, 2] == 0
    rest = group_advantages(REWARDS, scale)
    torch.testing.assert_close(torch.stack([advantages[0, [0, 2]], advantages[1, :2]]), rest)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_without_any_reward_gets_zero_and_leaves_others_alone(scale: str) -> None:
    advantages = group_advantages(torch.cat([REWARDS, torch.full((1, 2), NAN)]), scale)
    assert not advantages[2].any()
    torch.testing.assert_close(advantages[:2], group_advantages(REWARDS, scale))
    assert not group_advantages(torch.full((2, 2), NAN), scale).any()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_single_reward_in_a_group_gets_zero(scale: str) -> None:
    advantages = group_advantages(torch.tensor([[5.0, NAN, NAN], [0.0, 1.0, 2.0]]), scale)
    assert not advantages[0].any()


@pytest.mark.parametrize("scale", ["group", "none"])
def test_groups_do_not_see_each_other(scale: str) -> None:
    shifted = REWARDS + torch.tensor([[0.0], [100.0]])
    torch.testing.assert_close(group_advantages(shifted, scale), group_advantages(REWARDS, scale))


def test_unknown_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="scale_rewards is 'both'; allowed are group, batch, none"):
        group_advantages(REWARDS, "both")


def test_rewards_are_weighted_and_summed() -> None:
    rewards = torch.tensor([[[1.0, 2.0], [NAN, 2.0]], [[1.0, NAN], [NAN, NAN]]])
    combined = combine_rewards(rewards, torch.tensor([10.0, 1.0]))
    torch.testing.assert_close(combined, torch.tensor([[12.0, 2.0], [10.0, NAN]]), equal_nan=True)
