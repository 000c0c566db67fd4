"""The folder of an export is whole or not there, and nothing of others is lost."""

from pathlib import Path

import pytest
import torch
from export_tools import names_beside, spoil

from lowmem_grpo.models.export.folder import Exported, ExportError, new_folder
from lowmem_grpo.models.export.formats import export
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
    for out, message in ((tmp_path / "file", "file is a file"), (tmp_path / "file" / "out", "cannot be written")):
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
