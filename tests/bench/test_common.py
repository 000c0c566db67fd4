"""What the benchmarks share: rows as JSON and nothing else, tables for a terminal and a page."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.common import child, make_results, tables
from bench.common.rows import RESULTS, leave, read_rows
from bench.loop import step_time


def test_a_row_is_either_printed_or_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "folder" / "rows.jsonl"
    leave({"a": "b\nc"}, path, as_json=True)
    assert capsys.readouterr().out == '{"a": "b\\nc"}\n' and not path.exists()
    leave({"a": 1}, path, as_json=False)
    assert read_rows(path) == [{"a": 1}] and capsys.readouterr().out == ""


def test_what_a_row_lacks_is_an_empty_cell_and_a_missing_row_says_why() -> None:
    assert [tables.number({"a": 2**21, "b": None}, name, ".1f", 2**20) for name in "abc"] == ["2.0", "", ""]
    columns = {"provider": "provider", **{name: (name, ".1f") for name in "abc"}}
    assert tables.cells({"provider": "x", "missing": "no module | at all"}, columns) == [
        "x", "missing: no module / at all", "", ""]


def test_the_page_of_results_is_what_the_recorded_rows_make() -> None:
    assert make_results.document(RESULTS) == (make_results.HERE / "RESULTS.md").read_text(encoding="utf-8")


def test_an_environment_is_made_once_and_anew_where_a_command_failed(tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    make = ["mkdir", folder], ["touch", folder / "made"]
    with pytest.raises(subprocess.CalledProcessError):
        child.made_once(folder, *make, ["false"])
    assert [path.name for path in folder.iterdir()] == ["made"]
    assert child.made_once(folder, *make) == child.made_once(folder, ["false"]) == folder
    assert {path.name for path in folder.iterdir()} == {"made", "installed"}


def test_the_step_benchmark_prints_a_json_object_in_every_line_of_standard_output(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds and tables are for people: with --json they go to the other stream."""
    def run(provider: str, python: str, batch: int, steps: int, given: Any) -> dict[str, Any]:
        lists = ("seconds", "cpu_seconds", "generate_seconds", "tokens")
        return {"peak_bytes": 2**20, "threads": 1, "versions": {},
                "config": {"loss_type": given["loss_type"]}, **{name: [1.0 + batch] * steps for name in lists}}

    monkeypatch.setattr(step_time, "run", run)
    before = read_rows(RESULTS / "step_time.jsonl")
    done = CliRunner().invoke(step_time.main, ["--json", "--trl-python", "python", "--steps", "4", "--rounds", "1"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["loss_type"], row["provider"]) for row in rows] == [
        (loss, name) for loss in ("dr_grpo", "dapo") for name in ("lowmem_grpo", "trl")]
    assert "one GRPO step of 256 completions" in done.stderr and read_rows(RESULTS / "step_time.jsonl") == before
