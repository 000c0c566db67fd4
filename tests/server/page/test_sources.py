"""The runs of a folder as the page lists them."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowmem_grpo.server.page import sources
from lowmem_grpo.server.page.sources import RunsSource
from lowmem_grpo.server.users import OWNER, User
from tests.support.run_pages import write_run

ROOT = User(OWNER)


def test_the_list_is_made_anew_after_a_while_and_less_often_where_it_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks = [100.0], []

    def slow(folder: Path) -> list[object]:
        looks.append(now[0])
        now[0] += 3.0
        return []

    monkeypatch.setattr(sources, "runs_below", slow)
    monkeypatch.setattr(sources, "time", SimpleNamespace(monotonic=lambda: now[0]))
    source = RunsSource(tmp_path)
    for _ in range(100):
        source.all(ROOT)
        now[0] += 1.0
    assert 3 <= len(looks) <= 4, "a tenth of the time at most"


def test_a_log_is_looked_for_in_the_run_and_beside_a_job_and_nowhere_else(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("one", "7/run", "run"):
        write_run(runs / name, 1)
    (runs / "7/log.txt").write_text("of job 7")
    (runs / "log.txt").write_text("of the folder")
    (tmp_path / "log.txt").write_text("outside")
    source = RunsSource(runs)
    assert {name: source.folder(ROOT, name) for name in ("one", "7/run")} == {
        "one": (runs / "one", runs / "one/log.txt"), "7/run": (runs / "7/run", runs / "7/log.txt")}
    assert source.folder(ROOT, "none") is None
    alone = RunsSource(runs / "run")
    write_run(runs / "run", 1)
    assert alone.folder(ROOT, ".") == (runs / "run", runs / "run/log.txt")


def test_an_adapter_can_be_downloaded_where_there_is_one(tmp_path: Path) -> None:
    for name in ("none", "final", "checkpoint"):
        write_run(tmp_path / name, 1, {"status": "finished"})
    (tmp_path / "final/adapter").mkdir()
    (tmp_path / "checkpoint/checkpoint-5").mkdir()
    found = {each.name: each.actions for each in RunsSource(tmp_path).all(ROOT)}
    assert found == {"none": (), "final": ("export",), "checkpoint": ("export",)}


def test_a_folder_that_cannot_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses it to its user; root, who may run this test, could read everything."""
    write_run(tmp_path / "good", 1)
    write_run(tmp_path / "bad/inner", 1)

    def refusing(plain: Callable[..., Any]) -> Callable[..., Any]:
        def asked(path: Any, *more: Any, **options: Any) -> Any:
            if str(path).startswith(str(tmp_path / "bad")):
                raise PermissionError(13, "Permission denied", str(path))
            return plain(path, *more, **options)

        return asked

    for name in ("stat", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    assert [each.name for each in RunsSource(tmp_path).all(ROOT)] == ["good"]
