"""The runs of a folder, and what a page may show and do with them."""

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tables import every_row

from lowmem_grpo.runs.lock import boot, is_alive
from lowmem_grpo.server.page import sources
from lowmem_grpo.server.page.sources import RunsSource, runs_below, so_far, state_of
from lowmem_grpo.server.users import OWNER, User
from lowmem_grpo.utils import time_text
from tests.support.run_pages import write_run

HERE = {"host": socket.gethostname(), "boot": boot()}
ROOT = User(OWNER)


def owned_by(folder: Path, **owner: object) -> None:
    (folder / ".owner.json").write_text(json.dumps(owner))


def test_the_state_is_that_of_the_summary_or_of_who_writes(tmp_path: Path) -> None:
    for status in ("finished", "failed", "interrupted"):
        assert state_of(write_run(tmp_path / status, 3, {"status": status})) == status
    assert state_of(write_run(tmp_path / "cut", 3, {"status": "running"})) == "killed"
    owned_by(write_run(tmp_path / "again", 3, {"status": "finished"}), pid=2**22 + 5, **HERE)
    assert state_of(tmp_path / "again") == "killed"
    owned_by(write_run(tmp_path / "lives", 3, {"status": "finished"}), pid=os.getppid(), **HERE)
    assert state_of(tmp_path / "lives") == "running"


def test_how_far_a_run_is_comes_from_its_last_whole_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 12)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "elap')
    assert so_far(folder) == f"step 12 \u00b7 reward {last['reward']:.3g} \u00b7 {time_text(last['elapsed'])}"
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft/metrics.jsonl").write_text('{"step": 3, "elapsed": 70.0, "loss": 1.25}\n{"step": 3, "x": [\n')
    assert so_far(tmp_path / "sft") == "step 3 \u00b7 loss 1.25 \u00b7 1 min 10 s"
    assert so_far(tmp_path) == ""


@every_row("pid", [10**40, -1, 0, "x", None, [1], 1e300])
def test_a_process_number_that_is_none_is_no_living_process(tmp_path: Path, pid: object) -> None:
    assert not is_alive(HERE | {"pid": pid})
    owned_by(write_run(tmp_path / "run", 3), pid=pid, **HERE)
    assert state_of(tmp_path / "run") == "killed"


def test_a_run_of_another_machine_that_writes_nothing_is_silent_after_a_while(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3)
    owned_by(run, pid=5, host="elsewhere", boot="x")
    assert state_of(run) == "running"
    for path in run.iterdir():
        os.utime(path, (time.time() - 7200,) * 2)
    assert state_of(run) == "silent"
    [found] = runs_below(tmp_path)
    assert found.why.endswith("process 5 on elsewhere") and found.actions == ()


def test_runs_are_found_below_and_the_newest_are_kept_not_the_first_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in range(12):
        write_run(tmp_path / f"deep/er/run{place:02}", 1, {})
        for name in ("metrics.jsonl", "summary.json"):
            os.utime(tmp_path / f"deep/er/run{place:02}/{name}", (1000 + place,) * 2)
    write_run(tmp_path / "deep/er/run00/earlier/1", 1)
    write_run(tmp_path / "deep/er/run00/checkpoint-5", 1)
    monkeypatch.setattr(sources, "MOST_RUNS", 4)
    assert [run.name for run in runs_below(tmp_path)] == [f"deep/er/run{place}" for place in (11, 10, "09", "08")]


def test_a_link_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    write_run(tmp_path / "outside", 1)
    write_run(tmp_path / "folder/in", 1)
    os.symlink(tmp_path / "outside", tmp_path / "folder/link")
    assert [run.name for run in runs_below(tmp_path / "folder")] == ["in"]


def test_a_process_that_has_the_number_of_one_that_ended_is_not_stopped(tmp_path: Path) -> None:
    owned_by(write_run(tmp_path / "run", 1), pid=os.getppid(), **HERE)
    source = RunsSource(tmp_path)
    [found] = source.all(ROOT)
    assert found.state == "running" and found.actions == ()
    with pytest.raises(ValueError, match="cannot be stopped any more"):
        source.act(found, "stop")


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
    places = {run.name: run.paths for run in runs_below(runs)}
    assert places["one"] == (runs / "one", runs / "one/log.txt")
    assert places["7/run"] == (runs / "7/run", runs / "7/log.txt")
    assert runs_below(runs / "run")[0].paths == (runs / "run", runs / "run/log.txt")


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
