"""A queue of jobs under kills: a part of what `python -m bench.attacks.job_kills` tries."""

import sys
from pathlib import Path

import pytest

from bench.attacks.job_kills import KINDS, attack


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
def test_no_kill_loses_a_job_or_runs_one_twice(tmp_path: Path) -> None:
    verdicts = list(attack(tmp_path, len(KINDS), 2))
    assert [verdict for verdict in verdicts if not verdict.held] == []
    assert {verdict.kind for verdict in verdicts} == {*KINDS}
