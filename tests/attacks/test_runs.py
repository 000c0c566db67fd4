"""Runs that are killed, and runs whose files are damaged: a part of what the commands in tests/attacks try."""

from pathlib import Path

import pytest
import torch

from tests.attacks.corruptions import CASES, Case, attempt, stopped_run
from tests.attacks.kills import PHASES, Scenario, attack

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a process that uses CUDA cannot fork")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # a process that has started torch's threads cannot be forked


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    return stopped_run(tmp_path_factory.mktemp("corruptions"))


@pytest.mark.slow
@pytest.mark.attack
@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_a_damaged_file_is_named_and_costs_nothing_that_is_whole(stopped: Scenario, case: Case) -> None:
    assert attempt(stopped, case).damage == ""


@pytest.mark.slow
@pytest.mark.attack
@pytest.mark.parametrize("name", ["grpo", "sft", "new tokens", "whole embedding"])
def test_a_run_killed_at_any_moment_loses_and_repeats_nothing(tmp_path: Path, name: str) -> None:
    verdicts = list(attack(tmp_path, 10, 1, (name,)))
    assert [verdict for verdict in verdicts if not verdict.held] == []
    phases = {verdict.kind for verdict in verdicts}
    assert phases <= set(PHASES) and len(phases) >= 3
