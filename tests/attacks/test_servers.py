"""A queue of jobs, and a server that clients train on, under kills: a part of what `tests/attacks` tries."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from served import MODEL, OTHER, OWNER, serving

from tests.attacks import strangers
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


def test_hostile_values_in_a_few_fields_get_no_error_of_the_server_and_hold_up_no_one(tmp_path: Path) -> None:
    """A server of the model alone, in this process: 1 of 80 of all attacks."""
    with serving(tmp_path) as server:
        alive = SimpleNamespace(poll=lambda: None)
        target = strangers.Target(int(server.url.rpartition(":")[2]), OWNER, OTHER, MODEL, alive)
        verdicts = list(strangers.attack(target, 80))
    assert [verdict for verdict in verdicts if not verdict.held] == [] and len(verdicts) > 30


@pytest.mark.slow
@pytest.mark.attack
@pytest.mark.skipif(sys.platform == "win32", reason="jobs need the locks of Linux and macOS")
def test_no_hostile_value_in_any_field_of_any_route_breaks_a_server(tmp_path: Path) -> None:
    """All of them: `python -m tests.attacks.strangers`."""
    verdicts = list(strangers.attacked(tmp_path, 5))
    assert [verdict for verdict in verdicts if not verdict.held] == [] and len(verdicts) > 500
