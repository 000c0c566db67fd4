"""Statistics of rollouts: lengths, rewards that may be missing, groups with signal."""

import pytest
from tables import every_row

from lowmem_grpo.rollout.metrics import mean_and_std, rollout_metrics, spread, waiting_share
from lowmem_grpo.types import Rollout, RolloutGroup, Turn


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


@every_row(("rewards", "differ"), [
    ([1.0, 1.0], False), ([1.0, 0.0], True), ([1.0, None], False), ([None, None], False), ([1.0, None, 0.0], True),
])
def test_a_group_has_spread_only_where_rewards_that_are_there_differ(rewards: list[float | None], differ: bool) -> None:
    assert spread(RolloutGroup({}, [1], [rollout(1, reward) for reward in rewards])) is differ


def test_the_deviation_is_the_unbiased_one() -> None:
    assert mean_and_std("m", "s", [1.0, 2.0, None, 4.0]) == {"m": pytest.approx(7 / 3), "s": pytest.approx(1.527525)}


def episode(ending: str, *turns: Turn) -> Rollout:
    drawn = sum(len(turn.completion_ids) for turn in turns)
    return Rollout([1] * (drawn + 5), [0.0] * (drawn + 5), "stop", trained=[True] * drawn + [False] * 5,
                   turns=list(turns), ending=ending, reward=1.0)


def turn(prompt: int, tokens: int, cached: int = 0, calls: int = 0, failures: int = 0, seconds: float = 0.0) -> Turn:
    return Turn([1] * prompt, [1] * tokens, [0.0] * tokens, "stop", cached_tokens=cached, calls=calls,
                failures=failures, seconds=seconds)


def test_episodes_are_measured_by_what_the_policy_drew_and_by_their_turns() -> None:
    groups = [
        RolloutGroup({}, [1], [episode("done", turn(10, 2, calls=2, failures=1, seconds=1.0), turn(20, 4, cached=12)),
                               episode("max_turns", turn(10, 3, calls=1, seconds=0.5))]),
        RolloutGroup({}, [1], [episode("done", turn(10, 1)), episode("timeout", turn(10, 1))]),
    ]
    metrics = rollout_metrics(groups, [])
    wanted = {
        "completions/mean_length": 11 / 4, "completions/max_length": 6, "turns/mean": 5 / 4, "turns/min": 1,
        "turns/max": 2, "episodes/done": 0.5, "episodes/max_turns": 0.25, "episodes/timeout": 0.25,
        "episodes/answer": 0, "tools/call_frequency": 3 / 4, "tools/failure_frequency": 1 / 3,
        "tokens/cached_share": 12 / 60, "groups/lost": 1,
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted)
    assert waiting_share(groups, 3.0) == {"tools/waiting_share": pytest.approx(1.5 / 4 / 3)}


def test_nothing_of_episodes_is_logged_where_there_are_none_nor_of_tools_in_a_game() -> None:
    single = [RolloutGroup({}, [1], [rollout(2, 1.0), rollout(3, 0.0)])]
    assert not [name for name in rollout_metrics(single, []) if name.startswith(("turns", "episodes", "tools"))]
    assert waiting_share(single, 1.0) == {} and "groups/lost" not in rollout_metrics(single, [])
    game = [RolloutGroup({}, [1], [episode("done", turn(1, 1))])]
    assert not [name for name in rollout_metrics(game, []) if name.startswith("tools")]
    asked = [RolloutGroup({}, [1], [episode("answer", turn(1, 1))])]
    assert rollout_metrics(asked, [])["tools/call_frequency"] == 0
