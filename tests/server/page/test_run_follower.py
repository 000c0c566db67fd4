"""A run that is followed while it writes: its lines, its rows, and what a page shows of them."""

import json
import os
from pathlib import Path

import pytest
from tables import every_row

from lowmem_grpo.runs.views.headline import Warned
from lowmem_grpo.server.page import run_follower
from lowmem_grpo.server.page.run_follower import MOST_ROWS, JsonlTail, RunFollower, Series, log_tail
from tests.support.run_pages import metric, write_run


@pytest.mark.parametrize("steps", [300, MOST_ROWS, MOST_ROWS + 1, 12_345])
def test_rows_are_bounded_in_order_and_end_with_the_newest_step(steps: int) -> None:
    series = Series()
    for step in range(1, steps + 1):
        series.add_record(metric(step))
    rows = series.rows()
    found = [row["step"] for row in rows]
    assert len(rows) <= 2000 and found == sorted(set(found))
    assert found[0] == 1 and found[-1] == steps and series.steps == steps
    assert steps > 300 or rows == [{name: row[name] for name in rows[0]} for row in map(metric, found)]
    assert rows[-1]["reward"] == metric(steps)["reward"] and rows[-1]["kl"] == metric(steps)["kl"]


def test_spikes_alarms_and_shares_of_the_time_outlive_the_merging_of_steps() -> None:
    series = Series()
    for step in range(1, 20_001):
        times = {"time/generate": step % 2 * 0.6 + 0.2, "time/train": 0.6 - step % 2 * 0.6, "time/reward": 0.2}
        series.add_record(metric(step, loss=7.0 if step == 7777 else 0.0, kl=-3.0 if step == 15_001 else 0.0,
                                 **times | {"alarms/kl": float(step in (17, 3000, 3001))}))
    rows = series.rows()
    assert [abs(row["step"] - 7777) <= 2 * series.width for row in rows if row["loss"] == 7.0] == [True]
    assert [abs(row["step"] - 15_001) <= 2 * series.width for row in rows if row["kl"] == -3.0] == [True]
    assert series.warned == {"kl": Warned(3, 17, 3001)}
    for row in rows[:-1]:
        assert row["time/generate"] + row["time/train"] + row["time/reward"] == pytest.approx(1)


def test_an_evaluation_joins_its_step_and_a_step_that_was_made_again_counts_anew() -> None:
    series = Series()
    series.add_record({"step": 1, "reward": 0.25})
    series.add_record({"step": 1, "eval_reward": 0.5})
    series.add_record({"step": 1, "reward": 0.75})
    assert series.rows() == [{"step": 1, "reward": 0.75, "eval_reward": 0.5}] and series.steps == 1


def test_what_is_no_number_is_left_out_and_names_are_bounded() -> None:
    series = Series()
    series.add_record({"step": 1, "reward": "high", "loss": None, "kl": True, "entropy": 10**400, "grad_norm": 0.5})
    assert series.rows() == [{"step": 1, "grad_norm": 0.5}]
    for number in range(2000):
        series.add_record({"step": 2, f"rewards/{number}/mean": 1.0})
    assert len(series.rows()[-1]) <= 501


def steps(file: JsonlTail) -> list[int]:
    return [record["step"] for record in file.read_records()]


def test_only_what_was_appended_is_read_and_a_file_that_was_replaced_or_cut_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = JsonlTail(path)
    assert steps(file) == [] and not file.more
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert steps(file) == [1, 2] and steps(file) == []
    with path.open("a") as more:
        more.write('ep": 3}\n')
    assert steps(file) == [3] and file.damaged == 0
    (tmp_path / "other").write_text('{"step": 1}\n{"step": 9}\n{"step": 10}\n')
    os.replace(tmp_path / "other", path)
    assert steps(file) == [1, 9, 10] and file.is_new
    path.write_text('{"step": 4}\n')
    assert steps(file) == [4] and file.is_new
    path.unlink()
    assert steps(file) == [] and not file.is_new


def test_damaged_lines_and_steps_that_are_none_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 1e999}\n{"step": -1}\n{"step": NaN}\n{"step": true}\nno\n[]\n\n\xff\n'
                    '{"step": 2, "reward": 1e999}\n', encoding="latin-1")
    file = JsonlTail(path)
    assert file.read_records() == [{"step": 1}, {"step": 2, "reward": None}]
    assert file.damaged == 7


def test_a_long_file_is_read_in_pieces_and_a_line_longer_than_one_does_not_block_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_follower, "PIECE", 150)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "text": "x" * (5000 if step == 25 else 100)}) + "\n"
                            for step in range(50)))
    file, found, looks = JsonlTail(path), [], 0
    while looks == 0 or file.more:
        found += steps(file)
        looks += 1
    assert found == [step for step in range(50) if step != 25] and file.damaged == 1 and looks > 80


def test_of_a_large_file_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1000)))
    file = JsonlTail(path, last_bytes=100)
    found = steps(file)
    assert found == list(range(1000 - len(found), 1000)) and 5 <= len(found) <= 8
    assert file.skipped == path.stat().st_size - 100 and file.damaged == 0


def test_links_and_pipes_are_not_read_and_do_not_block(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"step": 1}\n')
    os.symlink(tmp_path / "secret", tmp_path / "link.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert steps(JsonlTail(tmp_path / "link.jsonl")) == steps(JsonlTail(tmp_path / "pipe.jsonl")) == []
    assert steps(JsonlTail(tmp_path / "secret")) == [1]


def followed(folder: Path) -> RunFollower:
    """A run after the first look at it."""
    run = RunFollower(folder, folder / "log.txt")
    run.read_news()
    return run


def test_a_page_is_told_that_all_is_read_though_the_last_look_found_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", 5)
    monkeypatch.setattr(run_follower, "PIECE", (folder / "metrics.jsonl").stat().st_size)  # it ends with a piece
    run = followed(folder)
    assert "still being read" in run.content()["note"]
    while run.completions.more:
        run.read_news()
    before, was_reading = run.version(), run.reading
    run.read_news()
    assert not run.reading and "still being read" not in run.content()["note"]
    assert not was_reading or run.version() != before


def test_a_run_that_was_resumed_is_read_anew(tmp_path: Path) -> None:
    run = followed(write_run(tmp_path / "run", 5))
    for name in ("metrics.jsonl", "completions.jsonl"):
        (tmp_path / "aside").write_text(json.dumps(metric(1)) + "\n")
        os.replace(tmp_path / "aside", tmp_path / "run" / name)
    run.read_news()
    assert [row["step"] for row in run.series.rows()] == [1] and run.logged == 1


@every_row("summary", [
    {"difference": 5}, {"samples": [5]}, {"samples": {"a": 1}}, {"accuracy_before": "x"}, {"machine": [1]},
    {"config": [1]}, {"steps": "many", "status": "failed"}, {"baselines": {"a": [1]}}, {"eval_problems": -4,
    "accuracy_after": 7}, {"train_seconds": "long"}])
def test_a_summary_of_another_form_does_not_take_the_page_away(tmp_path: Path, summary: dict[str, object]) -> None:
    run = followed(write_run(tmp_path / "run", 3, summary))
    assert run.content()["charts"] and run.charts()


def test_of_a_long_run_the_page_says_what_is_left_out_and_a_look_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_follower, "LAST_BYTES", 2000)
    monkeypatch.setattr(run_follower, "PIECE", 64 * 1024)
    folder = write_run(tmp_path / "run", 3000)
    run = RunFollower(folder, folder / "log.txt")
    looks = 0
    while looks == 0 or run.reading:
        run.read_news()
        looks += 1
        if run.reading:
            assert "still being read" in run.note()
    assert looks > 1
    assert "Of 3,000 steps, each 4 are drawn" in run.note() and "the last 0.0 MiB" in run.note()


def test_the_log_is_what_a_terminal_would_show_in_the_end(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(b"first\r\n10%\r20%\r30%\n\x1b[1;31mred\x1b[0m\x1b]0;title\x07 \x00text\nhalf \xff line\r")
    assert log_tail(log) == "first\n30%\nred text\nhalf \ufffd line"
    log.write_text("x" * 20_000 + "\nthe end\n")
    assert log_tail(log) == "the end\n"
    assert log_tail(tmp_path / "none") == ""
