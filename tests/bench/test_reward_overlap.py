"""bench/loop/reward_overlap.py on a tiny shape: rows of every case, and what early scoring hides."""

from pathlib import Path

import pytest
from programs import ran

from bench.common.rows import read_rows

pytestmark = pytest.mark.slow


def test_a_run_leaves_a_row_of_every_case_and_only_early_scoring_hides_time(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    done = ran("loop.reward_overlap", "--prompts", 4, "--tokens", 16, "--rounds", 1, "--output", output)
    rows = read_rows(output)
    cases = {(row["reward"].partition(",")[0] + row["reward"][-7:], row["score_while_sampling"]): row for row in rows}
    assert len(cases) == len(rows) == 7
    free, *others = rows
    assert (free["reward"], free["ratio"]) == ("none", 1.0)
    assert "0.2 s a call" in done.stdout and (free["tokens"], free["prompts"]) == (16, 4)
    for row in others:
        assert row["step"] > row["waited"] >= 0 and row["ratio"] > 0
        assert (row["hidden"] > 0) == row["score_while_sampling"]
        assert row["score_while_sampling"] or row["waited"] >= 0.2
