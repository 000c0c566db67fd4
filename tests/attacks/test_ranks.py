"""A run in two processes, of which one is killed: a part of what `tests/attacks` tries."""

from pathlib import Path

import pytest

from tests.attacks.rank_kills import attack


@pytest.mark.slow
@pytest.mark.attack
def test_no_kill_of_a_rank_loses_a_step_or_makes_one_twice(tmp_path: Path) -> None:
    verdicts = list(attack(tmp_path, 2, seed=2, steps=12))
    assert [verdict for verdict in verdicts if not verdict.held] == []
    assert any(verdict.kind.startswith("kills") for verdict in verdicts)
    assert any(verdict.kind == "finished runs" for verdict in verdicts)
