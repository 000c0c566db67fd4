"""Every test of the sandbox runs in each isolation that works here, and must leave no process behind."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from sandboxed import LIMITS, descendants

from lowmem_grpo.rewards.sandbox.trial import ISOLATIONS, Sandbox, why_not


@pytest.fixture(params=ISOLATIONS)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """Each isolation that works on this machine. Its limits on time are far away: right code is slow on a busy one."""
    if fault := why_not(request.param):
        pytest.skip(f"{request.param}: {fault}")
    return Sandbox(request.param, replace(LIMITS, seconds=60, total_seconds=120))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After every test: no process of ours that was not there before, and no scratch directory."""
    yield
    deadline = time.monotonic() + 60
    while (left := descendants()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, "these processes did not end in a minute"
