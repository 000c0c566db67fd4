"""Seconds of each phase of a step, and means over steps."""

import time

import pytest

from lowmem_grpo.runs.clock import Clock, mean_of


def test_the_clock_gives_each_phase_its_share_and_the_rest_to_idle() -> None:
    clock = Clock()
    for name, seconds in (("generate", 0.06), ("train", 0.02), ("train", 0.02)):
        with clock.phase(name):
            time.sleep(seconds)
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


def test_the_mean_over_optimizer_steps_takes_those_that_have_the_metric() -> None:
    assert mean_of([{"loss": 1.0, "kl": 3.0}, {"loss": 2.0}]) == {"kl": 3.0, "loss": 1.5}
