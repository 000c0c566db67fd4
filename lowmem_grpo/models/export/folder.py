"""The folder of an export, which is written under a temporary name and renamed when it is complete."""

import glob
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lowmem_grpo.runs.files import aside_of, explained, free_bytes, remove, removed_after, swap_in
from lowmem_grpo.runs.lock import boot, is_alive, try_lock
from lowmem_grpo.utils import size_text

RECORD = "export.json"  # marks a folder as an export; only such a folder is overwritten
HERE = re.sub(r"[^\w.-]", "_", socket.gethostname())[:32]
LEFT = re.compile(r"\.(?:(?P<old>old)|export)-(?:(?P<host>.+)-)?(?P<pid>\d+)")


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
        temp = final.parent / f".{final.name}.export-{HERE}-{os.getpid()}"
        remove_left(final)
        with removed_after(temp):
            temp.mkdir(parents=True)
            with locked_folder(temp):
                yield temp
                done.bytes = sum(path.stat().st_size for path in temp.rglob("*") if path.is_file())
                record = asdict(done) | {"folder": out.name}
                (temp / RECORD).write_text(json.dumps(record, indent=2) + "\n", "utf-8")
                swap_in(temp, final)
        remove(aside_of(final))


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder: without it, an export of this name may be deleted."""
    try:
        held = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        held = os.open(os.devnull, os.O_RDONLY)
    try_lock(held)
    try:
        yield
    finally:
        os.close(held)


def remove_left(final: Path) -> None:
    """Delete the whole models that killed exports into this folder left beside it. A process on another machine counts
    as alive. A free lock shows that another process has the number of a dead one."""
    for path in final.parent.glob(f".{glob.escape(final.name)}.*-*"):
        name = LEFT.fullmatch(path.name.removeprefix(f".{final.name}"))
        if name is None or name["host"] not in (None, HERE) or (name["old"] and not final.exists()):
            continue
        with suppress(OSError):  # another export deletes it at the same time
            is_free = lock_of(path)
            lives = is_alive({"pid": name["pid"], "host": socket.gethostname(), "boot": boot()})
            if (not lives and is_free is not False) or (is_free and name["host"] and any(path.iterdir())):
                remove(path)


def lock_of(path: Path) -> bool | None:
    """Return whether nobody holds the lock of a folder; None if its file system has no locks."""
    file = os.open(path, os.O_RDONLY)
    try:
        return try_lock(file)
    finally:
        os.close(file)


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
