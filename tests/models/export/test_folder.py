"""The folder of an export is whole or not there, and nothing of others is lost."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from export_tools import names_beside, spoil
from safetensors import SafetensorError

from lowmem_grpo.models.export.folder import HERE, Exported, ExportError, new_folder
from lowmem_grpo.models.export.formats import ExportSettings, export
from lowmem_grpo.models.export.merge import read_pairs
from lowmem_grpo.runs.saved_adapter import AdapterError


def test_a_folder_with_something_in_it_is_not_touched(adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    for overwrite, message in ((False, "is not empty"), (True, "is no export of this command")):
        with pytest.raises(ExportError, match=message):
            export(adapter, "adapter", out, overwrite=overwrite)
    assert names_beside(tmp_path) == ["out"]
    assert names_beside(out) == ["thesis.txt"]
    with pytest.raises(ExportError, match="holds the adapter that is to be exported"):
        export(adapter, "adapter", adapter.parent, overwrite=True)


def test_an_earlier_export_is_replaced_when_asked_and_stays_when_the_new_one_fails(
    adapter: Path, copy: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export(adapter, "adapter", out)
    (out / "left over").touch()
    spoil(copy, torch.nan)
    with pytest.raises(AdapterError):
        export(copy, "adapter", out, overwrite=True)
    assert (out / "left over").exists()
    export(adapter, "adapter", out, overwrite=True)
    assert not (out / "left over").exists()
    assert names_beside(tmp_path) == ["copy", "out"]


def test_a_link_is_followed_and_stays(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    for overwrite in (False, True):  # to nothing yet, then to an earlier export
        export(adapter, "adapter", tmp_path / "link", overwrite=overwrite)
        assert (tmp_path / "link").is_symlink()
        assert names_beside(tmp_path) == ["disk", "link"]
        assert names_beside(tmp_path / "disk") == ["real"]
        assert read_pairs(tmp_path / "link")


def test_a_place_that_cannot_be_written_is_named(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out, message in ((tmp_path / "file", "file is a file"), (tmp_path / "file" / "out", "was not written")):
        with pytest.raises(ExportError, match=message):
            export(adapter, "adapter", out)
    assert names_beside(tmp_path) == ["file"]


def test_a_full_disk_is_named_before_anything_is_written(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(ExportError, match=r"needs \d+\.\d MiB and 0\.0 MiB are free"):
        export(adapter, "merged", tmp_path / "out")
    assert names_beside(tmp_path) == []


def test_a_process_that_dies_inside_leaves_no_folder_of_that_name(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_folder(Exported(tmp_path / "out", "adapter", "", None), False) as temp:
        (temp / "half").touch()
        assert not (tmp_path / "out").exists()
        raise KeyboardInterrupt
    assert names_beside(tmp_path) == []


KILLED = """
import os, sys
from pathlib import Path
from lowmem_grpo.models.export.folder import Exported, new_folder
with new_folder(Exported(Path(sys.argv[1]), "merged", "a test", None), True) as temp:
    (temp / "model.safetensors").write_text("a whole model")
    print("written", flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), 9)
"""


def exporting(out: Path) -> "subprocess.Popen[str]":
    """Start an export that has written its model, and goes on once its input ends: it is then killed."""
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(out)], text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == "written\n"
    return process


def written(out: Path) -> None:
    with new_folder(Exported(out, "merged", "a test", None), True) as temp:
        (temp / "model.safetensors").write_text("mine")


def test_what_killed_exports_left_goes_with_the_next_one_and_what_goes_on_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    dead, other, alive = exporting(out), exporting(tmp_path / "out.2"), exporting(out)
    for process in (dead, other):
        process.communicate()
    assert len(names_beside(tmp_path)) == 3 and names_beside(tmp_path)[0].startswith(".out.")
    written(out)
    kept = names_beside(tmp_path)
    assert len(kept) == 3 and kept[0].startswith(".out.2.export-") and kept[1].endswith(f"-{alive.pid}")
    alive.communicate()
    written(out)
    assert names_beside(tmp_path) == [kept[0], "out"]


def test_who_left_a_folder_is_known_by_its_lock_its_process_and_its_machine(tmp_path: Path) -> None:
    """The process of this test's parent lives, and holds no lock of a folder: its number was used again."""
    gone, lives = 2**22 + 1, os.getppid()  # no process has a number above 2**22 on Linux
    left = [f".out.export-{gone}", f".out.export-{HERE}-{gone}", f".out.export-{HERE}-{lives}", f".out.old-{gone}"]
    kept = [f".out.export-{lives}", f".out.export-another-{gone}", ".out.export-mine", f".out.x.export-{gone}",
            f".outx.export-{gone}", f".out.old-{lives}"]
    written(tmp_path / "out")
    for name in (*left, *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("a whole model")
    written(tmp_path / "out")
    assert names_beside(tmp_path) == sorted([*kept, "out"])


def test_the_only_whole_export_is_never_deleted(tmp_path: Path) -> None:
    """A kill between two renames leaves the earlier export beside its place."""
    (tmp_path / f".out.old-{2**22 + 1}").mkdir()
    with pytest.raises(KeyError), new_folder(Exported(tmp_path / "out", "merged", "a test", None), True):
        raise KeyError
    assert names_beside(tmp_path) == [f".out.old-{2**22 + 1}"]


@pytest.mark.parametrize(("kind", "room"), [("adapter", 5000), ("merged", 200_000), ("merged", 10_000)])
def test_a_disk_that_takes_no_more_ends_an_export_in_one_line_and_the_earlier_one_stays(
    kind: str, room: int, adapter: Path, tmp_path: Path
) -> None:
    """The kernel refuses to let a file grow beyond the limit, as a full disk does."""
    written(tmp_path / "out")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(ExportError) as refused:
            export(adapter, kind, tmp_path / "out", ExportSettings(device="cpu"), overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(refused.value) == (f"{tmp_path / 'out'} was not written: File too large; no file may become that "
                                  "large here (`ulimit -f`): raise the limit, or choose another --out")
    assert names_beside(tmp_path) == ["out"] and (tmp_path / "out/model.safetensors").read_text() == "mine"


@pytest.mark.parametrize("error", [
    OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "quota"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    Exception("No space left on device (os error 28)"),  # as tokenizers raises it
])
def test_whatever_writes_when_the_disk_is_full_the_reason_is_said(error: Exception, tmp_path: Path) -> None:
    made = Exported(tmp_path / "out", "merged", "a test", None)
    with pytest.raises(ExportError, match=r"No space left|quota exceeded"), new_folder(made, False):
        raise error
    assert names_beside(tmp_path) == []
