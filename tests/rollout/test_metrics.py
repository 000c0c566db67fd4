"""What a step measured: means over micro-batches weighted by tokens, clocks, rewards that may be missing."""

import time

import pytest
import torch
from torch import tensor

from lowmem_grpo.losses.objective import Reducer
from lowmem_grpo.memory.peaks import peak_memory
from lowmem_grpo.rollout.metrics import mean_and_std, rollout_metrics, spread
from lowmem_grpo.runs.clock import Clock, mean_of
from lowmem_grpo.types import Rollout, RolloutGroup


def rollout(tokens: int, reward: float | None, finish: str = "stop", **rewards: float | None) -> Rollout:
    advantage = 0.0 if reward is None else reward - 0.5
    return Rollout([1] * tokens, [0.0] * tokens, finish, rewards=rewards, reward=reward,
                   advantage=advantage)  # type: ignore[arg-type]


def test_means_over_micro_batches_are_weighted_by_their_tokens() -> None:
    reducer = Reducer()
    reducer.add({"kl": tensor(1.0)}, 3)
    reducer.add({"kl": tensor(5.0)}, 1)
    assert reducer.result() == {"kl": pytest.approx(2.0)}


def test_minima_and_maxima_are_extremes_and_not_means() -> None:
    reducer = Reducer()
    for low, high in ((1.0, 5.0), (0.5, 9.0), (2.0, 3.0)):
        reducer.add({"ratio/min": tensor(low), "ratio/max": tensor(high)}, 10)
    assert reducer.result() == {"ratio/min": 0.5, "ratio/max": 9.0}


def test_a_metric_that_only_some_micro_batches_have_is_weighted_by_those() -> None:
    reducer = Reducer()
    reducer.add({"entropy": tensor(1.0)}, 2)
    reducer.add({"entropy": tensor(4.0), "kl": tensor(3.0)}, 1)
    assert reducer.result() == {"entropy": pytest.approx(2.0), "kl": pytest.approx(3.0)}


def test_nothing_added_and_no_weight_give_no_error() -> None:
    assert Reducer().result() == {}
    reducer = Reducer()
    reducer.add({"kl": tensor(0.0)}, 0)
    assert reducer.result() == {"kl": 0.0}


def test_the_clock_gives_each_phase_its_share_and_the_rest_to_idle() -> None:
    clock = Clock()
    with clock.phase("generate"):
        time.sleep(0.06)
    with clock.phase("train"):
        time.sleep(0.02)
    with clock.phase("train"):
        time.sleep(0.02)
    time.sleep(0.04)
    shares = clock.metrics()
    assert shares["step_time"] >= 0.14
    parts = [shares[f"time/{name}"] for name in ("generate", "reward", "train", "idle")]
    assert sum(parts) == pytest.approx(1.0)
    assert shares["time/reward"] == 0
    assert shares["time/generate"] * shares["step_time"] >= 0.06
    assert shares["time/train"] * shares["step_time"] >= 0.04
    assert shares["time/idle"] * shares["step_time"] >= 0.03


def test_a_phase_that_fails_is_counted_and_a_restart_forgets_it() -> None:
    clock = Clock()
    with pytest.raises(ZeroDivisionError), clock.phase("reward"):
        time.sleep(0.01)
        raise ZeroDivisionError
    assert clock.seconds["reward"] >= 0.01
    clock.restart()
    assert clock.seconds == {"generate": 0.0, "reward": 0.0, "train": 0.0}
    assert clock.metrics()["step_time"] < 0.01


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
    assert metrics["rewards/right/mean"] == 1.0
    assert metrics["rewards/right/std"] == 0.0
    assert "rewards/judge/mean" not in metrics
    assert metrics["reward"] == 2.0
    assert metrics["groups/with_signal"] == 1


def test_a_generation_without_any_reward_or_end_has_metrics_all_the_same() -> None:
    metrics = rollout_metrics([RolloutGroup({}, [1], [rollout(3, None, "length"), rollout(3, None, "length")])], ["r"])
    assert "reward" not in metrics
    assert metrics["frac_reward_zero_std"] == 1.0
    assert metrics["completions/mean_terminated_length"] == 0
    assert metrics["completions/clipped_ratio"] == 1.0


@pytest.mark.parametrize(("rewards", "differ"), [
    ([1.0, 1.0], False), ([1.0, 0.0], True), ([1.0, None], False), ([None, None], False), ([1.0, None, 0.0], True),
])
def test_a_group_has_spread_only_where_rewards_that_are_there_differ(
    rewards: list[float | None], differ: bool
) -> None:
    assert spread(RolloutGroup({}, [1], [rollout(1, reward) for reward in rewards])) is differ


def test_the_deviation_is_the_unbiased_one() -> None:
    assert mean_and_std("m", "s", [1.0, 2.0, None, 4.0]) == {"m": pytest.approx(7 / 3), "s": pytest.approx(1.527525)}


def test_the_mean_over_optimizer_steps_takes_those_that_have_the_metric() -> None:
    assert mean_of([{"loss": 1.0, "kl": 3.0}, {"loss": 2.0}]) == {"kl": 3.0, "loss": 1.5}


def test_peak_memory_of_this_process_is_bytes_and_not_kilobytes() -> None:
    peak = peak_memory(torch.device("cpu"))["memory/peak_bytes"]
    assert 50 * 2**20 < peak < 2**40  # torch alone needs more than 50 MiB
