"""A run that is followed: what the page shows of it, also of one that an enemy wrote."""

import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowmem_grpo.views.dashboard import appended, followed
from lowmem_grpo.views.dashboard.followed import Followed
from lowmem_grpo.views.dashboard.log_tail import log_tail
from lowmem_grpo.views.page_file import page
from tests.support.written_runs import ATTACK, append, completion, metric, write_hostile, write_run


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each glance at it is a millionth of a second after the one before: a look has time, unless it is given none."""
    glances = itertools.count(1)
    for module in (appended, followed):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(glances) / 1e6))


def test_what_a_run_appends_is_on_the_page_after_the_next_look(tmp_path: Path) -> None:
    run = Followed(write_run(tmp_path / "run", 5))
    run.look()
    before = run.version()
    assert run.content().data["charts"][1]["lines"][0][1] == [1, 2, 3, 4, 5]
    append(tmp_path / "run/metrics.jsonl", [metric(6)])
    append(tmp_path / "run/completions.jsonl", [completion(6, "the newest")])
    assert run.version() != before
    run.look()
    shown = run.content()
    assert shown.data["charts"][1]["lines"][0][1] == [1, 2, 3, 4, 5, 6]
    assert shown.data["samples"][-1]["completion"] == "the newest"
    assert "6" in shown.sections["top"] and not run.reading


def test_a_run_that_was_resumed_is_read_anew(tmp_path: Path) -> None:
    run = Followed(write_run(tmp_path / "run", 5))
    run.look()
    for name in ("metrics.jsonl", "completions.jsonl"):
        (tmp_path / "aside").write_text(json.dumps(metric(1)) + "\n")
        os.replace(tmp_path / "aside", tmp_path / "run" / name)
    run.look()
    assert [row["step"] for row in run.series.rows()] == [1] and run.logged == 1


def test_a_hostile_run_is_shown_escaped_and_nothing_outside_is_read(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("the secret")
    folder = write_hostile(tmp_path / "run", tmp_path / "secret.txt")
    run = Followed(folder, folder / "log.txt")
    run.look()
    shown = run.content()
    html = page(shown.title, shown.body(), shown.data)
    assert ATTACK not in html and "<img" not in html
    assert "&lt;b&gt;" in shown.sections["alarms"] and "7 damaged lines left out" in shown.sections["curves"]
    assert run.log() == "" and "the secret" not in html
    assert shown.data["samples"] and json.dumps(shown.data, allow_nan=False)
    assert run.charts()


@pytest.mark.parametrize("summary", [
    {"difference": 5}, {"samples": [5]}, {"samples": {"a": 1}}, {"accuracy_before": "x"}, {"machine": [1]},
    {"config": [1]}, {"steps": "many", "status": "failed"}, {"baselines": {"a": [1]}}, {"eval_problems": -4,
    "accuracy_after": 7}, {"right_above": "x"}, {"train_seconds": "long"}])
def test_a_summary_of_another_form_does_not_take_the_page_away(tmp_path: Path, summary: dict[str, object]) -> None:
    run = Followed(write_run(tmp_path / "run", 3, summary))
    run.look()
    assert "curves" in run.content().sections and run.charts()


def test_of_a_long_run_the_page_says_what_is_left_out_and_a_look_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "LAST_BYTES", 2000)
    folder = write_run(tmp_path / "run", 3000)
    run = Followed(folder)
    looks = 0
    while looks == 0 or run.reading:
        run.look(seconds=0)
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
