"""A folder that is either whole or absent: it is written aside, then swapped in."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def swap_in(temp: Path, folder: Path) -> None:
    """Give `temp` its final name. A checkpoint that already has this name is moved aside, and back on a failure."""
    aside = aside_of(folder)
    remove(aside)
    if folder.exists():
        os.rename(folder, aside)
    try:
        os.rename(temp, folder)
        flush(folder.parent)
    except BaseException:
        if not temp.exists():
            os.rename(folder, temp)
        if aside.exists():
            os.rename(aside, folder)
        raise


def aside_of(folder: Path) -> Path:
    """Where a checkpoint waits while its successor takes its name."""
    return folder.with_name(f".{folder.name}.old-{os.getpid()}")


def remove(path: Path) -> None:
    """Delete a folder, or a file or link of its name, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def removed_after(temp: Path) -> Iterator[None]:
    """Whatever happens inside, `temp` is gone afterwards; so is an earlier process's folder of that name before."""
    remove(temp)
    try:
        yield
    finally:
        remove(temp)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
