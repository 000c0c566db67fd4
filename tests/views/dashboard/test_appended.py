"""Reading a file that grows: whole lines only, on from where it stopped, whatever is in it."""

import json
import os
from pathlib import Path

import pytest

from lowmem_grpo.views.dashboard import appended
from lowmem_grpo.views.dashboard.appended import Appended


def steps(file: Appended) -> list[int]:
    file.look()
    return [record["step"] for record, _ in file.records()]


def test_only_what_was_appended_is_read_and_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = Appended(path)
    assert steps(file) == [] and not file.more
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert steps(file) == [1, 2]
    assert steps(file) == []
    with path.open("a") as more:
        more.write('ep": 3}\n')
    assert steps(file) == [3] and file.damaged == 0


def test_a_file_that_was_replaced_or_cut_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    file = Appended(path)
    assert steps(file) == [1, 2]
    (tmp_path / "other").write_text('{"step": 1}\n{"step": 9}\n{"step": 10}\n')
    os.replace(tmp_path / "other", path)
    assert file.look() and [record["step"] for record, _ in file.records()] == [1, 9, 10]
    path.write_text('{"step": 4}\n')
    assert file.look() and [record["step"] for record, _ in file.records()] == [4]


def test_damaged_lines_and_steps_that_are_none_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 1e999}\n{"step": -1}\n{"step": NaN}\n{"step": true}\nno\n[]\n\n\xff\n'
                    '{"step": 2, "reward": 1e999}\n', encoding="latin-1")
    file = Appended(path)
    file.look()
    assert [record for record, _ in file.records()] == [{"step": 1}, {"step": 2, "reward": None}]
    assert file.damaged == 7


def test_a_line_that_is_too_long_does_not_block_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appended, "LONGEST_LINE", 1000)
    monkeypatch.setattr(appended, "PIECE", 64)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "text": "' + "x" * 5000)
    file = Appended(path)
    assert steps(file) == [1]
    with path.open("a") as more:
        more.write("x" * 3000 + '"}\n{"step": 3}\n')
    assert steps(file) == [3] and file.damaged == 1


def test_a_look_ends_in_time_and_the_next_ones_reach_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appended, "PIECE", 40)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "text": "x" * 100}) + "\n" for step in range(50)))
    file, found, looks = Appended(path), [], 0
    while looks == 0 or file.more:
        file.look()
        found += [record["step"] for record, _ in file.records(until=-1.0)]
        looks += 1
    assert found == list(range(50)) and 10 < looks <= 51


def test_of_a_large_file_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1000)))
    file = Appended(path, last_bytes=100)
    found = steps(file)
    assert found == list(range(1000 - len(found), 1000)) and 5 <= len(found) <= 8
    assert file.skipped == path.stat().st_size - 100 and file.damaged == 0


def test_links_and_pipes_are_not_read_and_do_not_block(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"step": 1}\n')
    os.symlink(tmp_path / "secret", tmp_path / "link.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert steps(Appended(tmp_path / "link.jsonl")) == steps(Appended(tmp_path / "pipe.jsonl")) == []


def test_a_file_that_vanishes_between_look_and_reading_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    file = Appended(path)
    file.look()
    path.unlink()
    assert list(file.records()) == []
