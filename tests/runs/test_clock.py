"""Seconds of each phase of a step, and means over steps."""

from types import SimpleNamespace

import pytest

from lowmem_grpo.runs import clock as module
from lowmem_grpo.runs.clock import Clock, mean_of


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the clock reads; a test adds to them."""
    seconds = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    return seconds


def test_the_clock_gives_each_phase_its_share_and_the_rest_to_idle(now: list[float]) -> None:
    clock = Clock()
    for name, seconds in (("generate", 5.0), ("train", 1.0), ("train", 2.0)):
        with clock.phase(name):
            now[0] += seconds
    now[0] += 2.0
    clock.moved_to_train(1.0)
    shares = clock.metrics()
    assert shares["step_time"] == 10.0
    parts = {name: shares[f"time/{name}"] for name in ("generate", "reward", "train", "idle")}
    assert parts == pytest.approx({"generate": 0.4, "reward": 0.0, "train": 0.4, "idle": 0.2})


def test_a_phase_that_fails_is_counted_and_a_restart_forgets_it(now: list[float]) -> None:
    clock = Clock()
    with pytest.raises(ZeroDivisionError), clock.phase("reward"):
        now[0] += 3.0
        raise ZeroDivisionError
    assert clock.seconds["reward"] == 3.0
    clock.restart()
    assert clock.seconds == {"generate": 0.0, "reward": 0.0, "train": 0.0}
    now[0] += 1.0
    assert clock.metrics()["step_time"] == 1.0


def test_the_mean_over_optimizer_steps_takes_those_that_have_the_metric() -> None:
    assert mean_of([{"loss": 1.0, "kl": 3.0}, {"loss": 2.0}]) == {"kl": 3.0, "loss": 1.5}
