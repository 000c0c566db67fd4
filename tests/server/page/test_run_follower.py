"""A run that is followed: what the page shows of it, also of one that an enemy wrote."""

import json
import os
from pathlib import Path

import pytest

from lowmem_grpo.runs.views.report import one_file
from lowmem_grpo.server.page import plain_file, run_follower
from lowmem_grpo.server.page.plain_file import log_tail
from lowmem_grpo.server.page.run_follower import RunFollower
from tests.support.run_pages import ATTACK, append, completion, metric, write_hostile, write_run


def test_what_a_run_appends_is_on_the_page_after_the_next_look(tmp_path: Path) -> None:
    run = RunFollower(write_run(tmp_path / "run", 5))
    run.read_news()
    before = run.version()
    assert run.content()["charts"][1]["lines"][0]["steps"] == [1, 2, 3, 4, 5]
    append(tmp_path / "run/metrics.jsonl", [metric(6)])
    append(tmp_path / "run/completions.jsonl", [completion(6, "the newest")])
    assert run.version() != before
    run.read_news()
    shown = run.content()
    assert shown["charts"][1]["lines"][0]["steps"] == [1, 2, 3, 4, 5, 6]
    assert shown["samples"]["rows"][-1]["completion"] == "the newest"
    assert shown["top"]["tiles"][0] == ("steps", "6") and not run.reading


def test_a_page_is_told_that_all_is_read_though_the_last_look_found_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", 5)
    monkeypatch.setattr(plain_file, "PIECE", (folder / "metrics.jsonl").stat().st_size)  # it ends with a piece
    run = RunFollower(folder)
    run.read_news()
    assert "still being read" in run.content()["note"]
    while run.completions.more:
        run.read_news()
    before, was_reading = run.version(), run.reading
    run.read_news()
    assert not run.reading and "still being read" not in run.content()["note"]
    assert not was_reading or run.version() != before


def test_a_run_that_was_resumed_is_read_anew(tmp_path: Path) -> None:
    run = RunFollower(write_run(tmp_path / "run", 5))
    run.read_news()
    for name in ("metrics.jsonl", "completions.jsonl"):
        (tmp_path / "aside").write_text(json.dumps(metric(1)) + "\n")
        os.replace(tmp_path / "aside", tmp_path / "run" / name)
    run.read_news()
    assert [row["step"] for row in run.series.rows()] == [1] and run.logged == 1


def test_a_hostile_run_is_shown_escaped_and_nothing_outside_is_read(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("the secret")
    folder = write_hostile(tmp_path / "run", tmp_path / "secret.txt")
    run = RunFollower(folder, folder / "log.txt")
    run.read_news()
    shown = run.content()
    html = one_file(shown)
    assert ATTACK not in html and "<img" not in html
    assert shown["alarms"][0]["title"] == "<b>" and "7 damaged lines left out" in shown["note"]
    assert run.log() == "" and "the secret" not in html
    assert shown["samples"]["rows"] and json.dumps(shown, allow_nan=False)
    assert run.charts()


@pytest.mark.parametrize("summary", [
    {"difference": 5}, {"samples": [5]}, {"samples": {"a": 1}}, {"accuracy_before": "x"}, {"machine": [1]},
    {"config": [1]}, {"steps": "many", "status": "failed"}, {"baselines": {"a": [1]}}, {"eval_problems": -4,
    "accuracy_after": 7}, {"right_above": "x"}, {"train_seconds": "long"}])
def test_a_summary_of_another_form_does_not_take_the_page_away(tmp_path: Path, summary: dict[str, object]) -> None:
    run = RunFollower(write_run(tmp_path / "run", 3, summary))
    run.read_news()
    assert run.content()["charts"] and run.charts()


def test_of_a_long_run_the_page_says_what_is_left_out_and_a_look_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_follower, "LAST_BYTES", 2000)
    monkeypatch.setattr(plain_file, "PIECE", 64 * 1024)
    folder = write_run(tmp_path / "run", 3000)
    run = RunFollower(folder)
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
