"""The folder of an export, which is written under a temporary name and renamed when it is complete."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lowmem_grpo.runs.files import aside_of, explained, free_bytes, remove, removed_after, swap_in
from lowmem_grpo.utils import size_text

RECORD = "export.json"  # marks a folder as an export; only such a folder is overwritten


class ExportError(ValueError):
    """An export failed or was refused; the message says why, and what to do."""


@dataclass
class Exported:
    """An exported model, and the results of its checks."""

    folder: Path
    format: str
    source: str
    base: str | None
    bytes: int = 0
    checks: dict[str, Any] = field(default_factory=dict)
    address: str | None = None  # URL of the commit on the hub


@contextmanager
def new_folder(done: Exported, overwrite: bool, source: Path | None = None) -> Iterator[Path]:
    """Yield a new folder, which at the end gets the export's record and is renamed to `done.folder` (if that is a link,
    to its target). After an error it is deleted. ExportError if `done.folder` is in use or cannot be written."""
    out = done.folder
    with explained(out, ExportError, "--out"):
        check_out(out, overwrite, source)
        final = out.resolve()  # a link cannot be renamed over, and stays
        temp = final.parent / f".{final.name}.export-{os.getpid()}"
        with removed_after(temp):
            temp.mkdir(parents=True)
            yield temp
            done.bytes = sum(path.stat().st_size for path in temp.rglob("*") if path.is_file())
            record = asdict(done) | {"folder": out.name}
            (temp / RECORD).write_text(json.dumps(record, indent=2) + "\n", "utf-8")
            swap_in(temp, final)
        remove(aside_of(final))


def check_out(out: Path, overwrite: bool, source: Path | None) -> None:
    """Raise ExportError if `out` is a file or a folder with files. With `overwrite`, it may hold an earlier export."""
    if out.exists() and not out.is_dir():
        raise ExportError(f"{out} is a file; choose a folder for the export")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if source is not None and source.resolve().is_relative_to(out.resolve()):
        raise ExportError(f"{out} holds the adapter that is to be exported; choose another --out")
    if not overwrite:
        raise ExportError(f"{out} is not empty; choose another folder, or replace an earlier export with --overwrite "
                          "(in Python: overwrite=True)")
    if not (out / RECORD).is_file():
        raise ExportError(f"{out} holds something that is no export of this command ({RECORD} is missing); "
                          "--overwrite would delete it. Choose another --out")


def check_disk(folder: Path, needed: int) -> None:
    """Raise ExportError if the disk has less than `needed` bytes free."""
    free = free_bytes(folder)
    if free is not None and free < needed:
        raise ExportError(f"the export needs {size_text(needed)} and {size_text(free)} are free in "
                          f"{folder.parent}; make room, or choose an --out on another disk")
