"""A queue of jobs, and a server that clients train on, under kills: a part of what `tests/attacks` tries."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attacks.job_kills import KINDS, attack


@pytest.mark.slow
@pytest.mark.attack
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
def test_no_kill_loses_a_job_or_runs_one_twice(tmp_path: Path) -> None:
    verdicts = list(attack(tmp_path, len(KINDS), 2))
    assert [verdict for verdict in verdicts if not verdict.held] == []
    assert {verdict.kind for verdict in verdicts} == {*KINDS}


@pytest.mark.slow
@pytest.mark.attack
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks servers")
def test_no_kill_of_a_server_loses_an_answered_step_or_makes_one_twice() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.attacks.service_kills", "--count", "4"], capture_output=True,
                          text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
