"""Statistics of rollouts: lengths, rewards that may be missing, groups with signal."""

import pytest

from lowmem_grpo.rollout.metrics import mean_and_std, rollout_metrics, spread
from lowmem_grpo.types import Rollout, RolloutGroup


def rollout(tokens: int, reward: float | None, finish: str = "stop", **rewards: float | None) -> Rollout:
    advantage = 0.0 if reward is None else reward - 0.5
    return Rollout([1] * tokens, [0.0] * tokens, finish, rewards=rewards, reward=reward,
                   advantage=advantage)  # type: ignore[arg-type]


def test_lengths_and_rewards_are_those_of_the_generation() -> None:
    groups = [
        RolloutGroup({}, [1], [rollout(2, 1.0, right=1.0), rollout(4, 0.0, right=0.0)]),
        RolloutGroup({}, [1], [rollout(8, 0.5, "length", right=0.5), rollout(6, 0.5, right=0.5)]),
    ]
    metrics = rollout_metrics(groups, ["right"])
    assert metrics == {
        "completions/mean_length": 5, "completions/min_length": 2, "completions/max_length": 8,
        "completions/mean_terminated_length": 4, "completions/min_terminated_length": 2,
        "completions/max_terminated_length": 6, "completions/clipped_ratio": 0.25, "frac_reward_zero_std": 0.5,
        "groups/total": 2, "groups/with_signal": 1, "groups/signal_share": 0.5, "rewards/right/mean": 0.5,
        "rewards/right/std": pytest.approx((0.5 / 3) ** 0.5), "reward": 0.5,
        "reward_std": pytest.approx((0.5 / 3) ** 0.5),
    }


def test_missing_rewards_are_left_out_of_means_instead_of_counted_as_zero() -> None:
    rollouts = [rollout(1, 1.0, right=1.0, judge=None), rollout(1, 3.0, right=None, judge=None), rollout(1, None)]
    metrics = rollout_metrics([RolloutGroup({}, [1], rollouts)], ["right", "judge"])
    assert (metrics["rewards/right/mean"], metrics["rewards/right/std"], metrics["reward"]) == (1, 0, 2)
    assert "rewards/judge/mean" not in metrics and metrics["groups/with_signal"] == 1


def test_a_generation_without_any_reward_or_end_has_metrics_all_the_same() -> None:
    metrics = rollout_metrics([RolloutGroup({}, [1], [rollout(3, None, "length"), rollout(3, None, "length")])], ["r"])
    assert "reward" not in metrics
    assert metrics["frac_reward_zero_std"] == 1.0
    assert metrics["completions/mean_terminated_length"] == 0
    assert metrics["completions/clipped_ratio"] == 1.0


@pytest.mark.parametrize(("rewards", "differ"), [
    ([1.0, 1.0], False), ([1.0, 0.0], True), ([1.0, None], False), ([None, None], False), ([1.0, None, 0.0], True),
])
def test_a_group_has_spread_only_where_rewards_that_are_there_differ(rewards: list[float | None], differ: bool) -> None:
    assert spread(RolloutGroup({}, [1], [rollout(1, reward) for reward in rewards])) is differ


def test_the_deviation_is_the_unbiased_one() -> None:
    assert mean_and_std("m", "s", [1.0, 2.0, None, 4.0]) == {"m": pytest.approx(7 / 3), "s": pytest.approx(1.527525)}
