"""Reading a file that grows: whole lines only, on from where it stopped, whatever is in it."""

import json
import os
from pathlib import Path

import pytest

from lowmem_grpo.server.page import plain_file
from lowmem_grpo.server.page.plain_file import JsonlTail


def steps(file: JsonlTail) -> list[int]:
    file.is_new_file()
    return [record["step"] for record in file.read_records()]


def test_only_what_was_appended_is_read_and_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = JsonlTail(path)
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
    file = JsonlTail(path)
    assert steps(file) == [1, 2]
    (tmp_path / "other").write_text('{"step": 1}\n{"step": 9}\n{"step": 10}\n')
    os.replace(tmp_path / "other", path)
    assert file.is_new_file() and [record["step"] for record in file.read_records()] == [1, 9, 10]
    path.write_text('{"step": 4}\n')
    assert file.is_new_file() and [record["step"] for record in file.read_records()] == [4]


def test_damaged_lines_and_steps_that_are_none_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 1e999}\n{"step": -1}\n{"step": NaN}\n{"step": true}\nno\n[]\n\n\xff\n'
                    '{"step": 2, "reward": 1e999}\n', encoding="latin-1")
    file = JsonlTail(path)
    file.is_new_file()
    assert file.read_records() == [{"step": 1}, {"step": 2, "reward": None}]
    assert file.damaged == 7


def test_a_line_that_is_too_long_does_not_block_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_file, "PIECE", 1000)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "text": "' + "x" * 5000)
    file = JsonlTail(path)
    assert steps(file) == [1]
    while file.more:
        assert steps(file) == []
    with path.open("a") as more:
        more.write("x" * 3000 + '"}\n{"step": 3}\n')
    found = steps(file)
    while file.more:
        found += steps(file)
    assert found == [3] and file.damaged == 1


def test_a_long_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_file, "PIECE", 150)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "text": "x" * 100}) + "\n" for step in range(50)))
    file, found, looks = JsonlTail(path), [], 0
    while looks == 0 or file.more:
        found += steps(file)
        looks += 1
    assert found == list(range(50)) and looks == 50


def test_of_a_large_file_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1000)))
    file = JsonlTail(path, last_bytes=100)
    found = steps(file)
    assert found == list(range(1000 - len(found), 1000)) and 5 <= len(found) <= 8
    assert file.skipped == path.stat().st_size - 100 and file.damaged == 0


def test_links_and_pipes_and_what_vanishes_are_not_read_and_do_not_block(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"step": 1}\n')
    os.symlink(tmp_path / "secret", tmp_path / "link.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert steps(JsonlTail(tmp_path / "link.jsonl")) == steps(JsonlTail(tmp_path / "pipe.jsonl")) == []
    file = JsonlTail(tmp_path / "secret")
    assert file.is_new_file()
    (tmp_path / "secret").unlink()  # between a look and reading
    assert file.read_records() == []
