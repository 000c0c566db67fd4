"""The time of each rank, and the rank that holds up the others."""

import logging

import pytest

from lowmem_grpo.parallel.paces import STEPS, Paces


def test_each_rank_has_metrics_of_its_own() -> None:
    found = Paces().metrics([{"busy_s": 1.0, "waiting_s": 0.5}, {"busy_s": 1.25, "waiting_s": 0.25}])
    assert found == {"ranks/0/busy_s": 1.0, "ranks/0/waiting_s": 0.5, "ranks/1/busy_s": 1.25, "ranks/1/waiting_s": 0.25}


def test_a_rank_that_is_slow_step_after_step_is_said_once_by_its_number(caplog: pytest.LogCaptureFixture) -> None:
    paces = Paces()
    with caplog.at_level(logging.WARNING, "lowmem_grpo.parallel.paces"):
        for _ in range(STEPS - 1):
            paces.look([1.0, 2.1, 1.0])
        paces.look([1.0, 1.1, 1.0])  # not in a row
        assert caplog.messages == []
        for _ in range(3 * STEPS):
            paces.look([1.0, 2.1, 1.0])
    (said,) = caplog.messages
    assert said.startswith("rank 1 takes 2.1 times as long as the others")
