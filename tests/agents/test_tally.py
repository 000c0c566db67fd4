"""Numbers of trajectories of several processes add up to those of one that has all trajectories."""

import pytest

from lowmem_grpo.agents.tally import Tally, of_split, tally_of
from lowmem_grpo.agents.trajectories import Trajectory, TrajectoryGroup


def group(*rewards: float, failed: int = 0) -> TrajectoryGroup:
    return TrajectoryGroup([Trajectory(reward=reward, metrics={"won": reward > 0}) for reward in rewards],
                           exceptions=[ValueError("x")] * failed, metrics={"size": len(rewards)})


def test_parts_of_any_size_have_the_means_of_the_whole() -> None:
    groups = [group(1.0, 0.0), group(1.0, 1.0, 0.0, failed=1), group(0.5)]
    whole = tally_of(groups, {}).metrics()
    assert whole["reward"] == pytest.approx(3.5 / 6) and whole["won"] == pytest.approx(4 / 6)
    assert whole["exception_rate"] == pytest.approx(1 / 7) and whole["group_size"] == 2
    for cut in range(4):
        parts = Tally.total([tally_of(groups[:cut], {}), tally_of(groups[cut:], {})])
        assert parts.metrics() == pytest.approx(whole)


def test_sums_are_added_and_a_mean_of_none_is_zero() -> None:
    total = Tally.total([Tally({"seen": 2}, {"spread": []}), Tally({"seen": 3, "lost": 1})])
    assert total.metrics() == {"seen": 5, "lost": 1, "spread": 0.0}


def test_numbers_of_the_caller_go_before_those_of_trajectories_and_carry_the_split() -> None:
    assert of_split("val", tally_of([], {})) == {}
    found = of_split("val", tally_of([group(1.0)], {"won": 0.25, "val/cost": 2}))
    assert (found["val/won"], found["val/cost"], found["val/reward_std_dev"]) == (0.25, 2.0, 0.0)
