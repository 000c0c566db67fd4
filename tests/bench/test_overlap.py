"""bench/loop/overlap.py on a tiny shape: rows of every case, with the same completions in each."""

from pathlib import Path

import pytest
from programs import ran

from bench.common.rows import read_rows

pytestmark = pytest.mark.slow


def test_a_run_leaves_a_row_of_every_case_over_the_same_completions(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    done = ran("loop.overlap", "--prompts", 8, "--tokens", 48, "--rounds", 1, "--output", output)
    rows = read_rows(output)
    assert [row["case"] for row in rows] == ["off", "in turn", "parallel"]
    assert rows[0]["ratio"] == 1 and rows[0]["share"] == 0 and "target: at most 0.85" in done.stdout
    assert len({(row["mean_length"], row["longest"]) for row in rows}) == 1
    assert all(row["ratio"] > 0 and row["mean_length"] < row["longest"] <= 48 for row in rows)
