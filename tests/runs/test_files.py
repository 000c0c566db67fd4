"""A run on a file system that does not know what Linux's own know: network and shared folders, FUSE, Windows."""

import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import SafetensorError
from trainer_runs import adapter, load, make

from lowmem_grpo.models.export.folder import Exported, ExportError, check_disk, new_folder
from lowmem_grpo.runs import files, lock
from lowmem_grpo.runs.files import lock_file
from lowmem_grpo.runs.records import RecordError, read_lines
from lowmem_grpo.runs.views.report import write_report

# Linux's manual pages and reports of such folders name these.
ABSENT = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS)
FAILED = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def refuse(number: int) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


def open_files_only(path: Any, flags: int, *mode: int) -> int:
    """`os.open` on Windows, whose fsync moreover needs a file that may be written."""
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    assert flags & os.O_RDWR
    return os.open(path, flags, *mode)


class Odd:
    """The module `os` on another file system."""

    def __init__(self, **calls: Callable[..., Any]) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        return self.calls.get(name) or getattr(os, name)


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(**calls: Callable[..., Any]) -> None:
        monkeypatch.setattr(files, "os", Odd(**calls))

    files.SAID.clear()
    return use


def network_folder(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    no = refuse(errno.ENOTSUP)
    odd(fsync=no, replace=no)
    monkeypatch.setattr(fcntl, "flock", no)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 0))  # type: ignore[attr-defined]


def windows(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    odd(open=open_files_only)
    for module in (files, lock):
        monkeypatch.setattr(module, "fcntl", None)
    for name in ("pread", "pwrite", "O_CLOEXEC", "killpg", "kill"):
        monkeypatch.delattr(os, name)
    monkeypatch.setitem(sys.modules, "resource", None)


@pytest.mark.parametrize("kind", [network_folder, windows])
def test_a_run_there_is_saved_resumed_and_repeated_as_on_any_disk(
    tmp_path: Path, odd: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, kind: Any
) -> None:
    runs = {}
    for place in ("usual", "odd"):
        if place == "odd":
            kind(odd, monkeypatch)
        for steps in (1, 2):
            trainer = make(tmp_path / place, model=load(), save_strategy="steps", save_steps=1, max_steps=steps)
            caplog.clear()
            trainer.train(resume_from_checkpoint=steps == 2)
            said = [record.getMessage() for record in caplog.records if "does not know" in record.getMessage()]
        runs[place] = adapter(trainer.model), [line["loss"] for line in read_lines(trainer.run_dir / "metrics.jsonl")]
    assert all(torch.equal(runs["usual"][0][name], value) for name, value in runs["odd"][0].items())
    assert runs["usual"][1] == runs["odd"][1] and len(runs["odd"][1]) == 2
    names = sorted({what for what in files.LOST for line in said if f"does not know {what} " in line})
    assert len(said) == len(names) and {"flushing a folder", "locks"} <= set(names), "each is said once in a run"
    assert not [path.name for path in trainer.run_dir.iterdir() if path.name.startswith(".")]
    trainer.train()
    assert (trainer.run_dir / "earlier" / "1" / "checkpoint-2" / "manifest.json").is_file()


@pytest.mark.parametrize("number", ABSENT)
def test_what_a_file_system_does_not_know_is_done_without(number: int, tmp_path: Path, odd: Any, caplog: Any,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    odd(fsync=refuse(number), replace=refuse(number))
    monkeypatch.setattr(fcntl, "flock", refuse(number))
    monkeypatch.setattr(shutil, "disk_usage", refuse(number))
    (tmp_path / "new").write_text("new")
    (tmp_path / "old").write_text("old")
    files.move(tmp_path / "new", tmp_path / "old")
    files.flush(tmp_path), files.flush(tmp_path / "old"), files.flush(tmp_path)
    assert (tmp_path / "old").read_text() == "new" and not (tmp_path / "new").exists()
    assert files.free_bytes(tmp_path) is None
    check_disk(tmp_path, 2**60)
    with lock.owned(tmp_path / "run"):
        pass
    with pytest.raises(OSError, match=r"a file system without locks.*give --folder one on a local disk"):
        lock_file(tmp_path / "keeper.lock")
    assert caplog.text.count("does not know flushing a folder") == 1 and os.strerror(number) in caplog.text


@pytest.mark.parametrize("number", FAILED)
def test_what_a_disk_refuses_is_no_missing_call(number: int, tmp_path: Path, odd: Any) -> None:
    odd(fsync=refuse(number), replace=refuse(number))
    (tmp_path / "file").touch()
    for call in (lambda: files.flush(tmp_path), lambda: files.move(tmp_path / "file", tmp_path / "other")):
        with pytest.raises(OSError, match=os.strerror(number)):
            call()


@pytest.mark.parametrize("number", [errno.EEXIST, errno.EPERM])
def test_a_file_is_replaced_where_only_renaming_over_it_is_refused(number: int, tmp_path: Path, odd: Any) -> None:
    odd(replace=refuse(number))
    (tmp_path / "new").write_text("new")
    (tmp_path / "old").write_text("old")
    files.move(tmp_path / "new", tmp_path / "old")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old", "new")]


def test_a_folder_stays_as_it_was_if_its_successor_cannot_be_moved(tmp_path: Path, odd: Any) -> None:
    odd(replace=lambda source, target: (refuse(errno.ENOSPC) if source.name == "new" else os.replace)(source, target))
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(OSError, match="No space left"):
        files.swap_in(tmp_path / "new", tmp_path / "old")
    assert {path.name: (path / "file").read_text() for path in tmp_path.iterdir()} == {"old": "old", "new": "new"}


def test_a_lock_file_that_seems_to_be_another_each_time_is_taken_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "is_at", lambda file, path: False)
    with lock.owned(tmp_path):
        assert (tmp_path / lock.FILE).is_file()


FULL = r"was not written: No space left on device; make room \([\d,]+ bytes were free before\)"


@pytest.mark.parametrize("error", [
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
], ids=["without a name", "of safetensors"])
def test_a_full_disk_ends_an_export_and_a_save_in_one_line_and_leaves_what_was(
    error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "export.json").write_text("earlier")
    with pytest.raises(ExportError, match=f"out {FULL}"), new_folder(Exported(tmp_path / "out", "", "", ""), True):
        raise error
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "export.json").read_text() == "earlier"
    model = load()
    monkeypatch.setattr(type(model), "write_adapter", lambda *args: (_ for _ in ()).throw(error))
    with pytest.raises(OSError, match=f"^{tmp_path}/lora {FULL}"):
        model.save_lora(tmp_path / "lora")


def test_a_source_that_cannot_be_read_is_named_and_not_the_export(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"out was not written: Input/output error \(.*weights\)"), \
            new_folder(Exported(tmp_path / "out", "", "", ""), False):
        raise OSError(errno.EIO, "Input/output error", str(tmp_path / "weights"))


def test_the_free_space_that_a_file_system_does_say_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert files.free_bytes(Path()) == 0


def test_an_interrupted_card_leaves_the_earlier_one(tmp_path: Path) -> None:
    files.write_card(tmp_path, "first")
    before = (tmp_path / files.CARD).read_text()
    with pytest.raises(UnicodeEncodeError):
        files.write_card(tmp_path, "second, and a character that no file can have: \ud800")
    assert (tmp_path / files.CARD).read_text() == before and [*tmp_path.iterdir()] == [tmp_path / files.CARD]


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder"])
def test_a_strangers_link_in_place_of_a_temporary_file_leads_a_write_elsewhere(kind: str, tmp_path: Path) -> None:
    run, secret = tmp_path / "run", tmp_path / "secret"
    run.mkdir()
    secret.write_text("mine")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    for aside in (run / ".summary.json.tmp", run / "report.html.partial"):
        if kind == "folder":
            aside.mkdir()
        else:
            aside.symlink_to(secret if kind == "link" else tmp_path / "new")
    files.write_whole(run / "summary.json", "{}")
    write_report(run)
    assert secret.read_text() == "mine" and sorted(path.name for path in tmp_path.iterdir()) == ["run", "secret"]
    assert (run / "summary.json").read_text() == "{}" and not (run / "report.html").is_symlink()
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "report.html", "summary.json"]


def test_a_lock_that_is_a_pipe_is_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / lock.FILE)
    with (patch.object(os, "read", side_effect=AssertionError("it is waited for")),
          pytest.raises(RecordError, match=r"\.owner\.json was not written: it is a pipe or a device"),
          lock.owned(tmp_path)):
        pass


def test_a_lock_that_is_a_link_leaves_the_file_behind_it_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / lock.FILE).symlink_to(tmp_path / "mine")
    with pytest.raises(RecordError, match=r"\.owner\.json was not written"), lock.owned(tmp_path):
        pass
    assert (tmp_path / "mine").read_text() == "mine"
