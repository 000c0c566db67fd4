"""File operations of a run: folders are swapped in atomically, and disk errors are explained with advice."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ADVICE = {
    errno.EDQUOT: "your quota on this disk is used up: make room",
    errno.EROFS: "the disk is read-only now (a disk that fails turns so by itself; `dmesg` says why): mend it, or "
                 "choose another output_dir",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change the permissions, or choose another output_dir"),
    **dict.fromkeys((errno.EISDIR, errno.ENOTEMPTY), "a folder is where the run writes a file: move it away"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "a file is where the run needs a folder: move it away"),
    errno.EFBIG: "no file may become that large here (`ulimit -f`): raise the limit, or choose another output_dir",
    errno.EIO: "the disk fails (`dmesg` says why): choose an output_dir on another one",
}


def existing(path: Path) -> Path:
    """Return the path itself, or the nearest folder above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def place_fault(folder: Path, option: str = "output_dir") -> tuple[str, str] | None:
    """Return (fault, advice) if a folder cannot be written to, else None. `option` is the setting that names it."""
    place = existing(folder)
    if not place.is_dir():
        return f"{option} is {str(folder)!r}, and {place} is a file", f"choose another {option}"
    if not os.access(place, os.W_OK | os.X_OK):
        return (f"{option} is {str(folder)!r}, and {place} cannot be written to",
                f"choose another {option}, or change the folder's permissions")
    return None


def check_place(folder: Path, option: str) -> None:
    """Raise OSError if the folder given by `option` cannot be written to."""
    if fault := place_fault(folder, option):
        raise OSError("; ".join(fault))


def free_bytes(path: Path) -> int | None:
    """Return the free bytes on the disk of a path, which need not exist yet; None if unknown."""
    try:
        return shutil.disk_usage(existing(path)).free
    except OSError:
        return None


def refused(path: Path, error: Exception, needed: int, free: int | None) -> str:
    """Return the message for a disk that refused `needed` bytes at `path`; `free` bytes were free before."""
    number = errno_of(error)
    words = str(error) if number is None else os.strerror(number)
    return f"{path} was not written: {words}; {advice(number, needed, free)}"


def errno_of(error: Exception) -> int | None:
    match = re.search(r"os error (\d+)", str(error))  # an error of safetensors or tokenizers has it only in its text
    return error.errno if isinstance(error, OSError) else int(match[1]) if match else None


def advice(number: int | None, needed: int, free: int | None) -> str:
    """Return advice for an errno. ENOSPC with enough free bytes means a quota, or no free inodes."""
    if number != errno.ENOSPC:
        return ADVICE.get(number or 0, "mend that, or choose another output_dir")
    if free is None or free < needed:
        return f"it needs about {needed:,} bytes{'' if free is None else f' and {free:,} were free'}: make room"
    return (f"it needs about {needed:,} bytes, and {free:,} were free before. So either something else filled the disk "
            "at the same time, or a quota or the number of files (`df -i`) is at its limit: make room there")


def swap_in(temp: Path, folder: Path) -> None:
    """Rename `temp` to `folder`. An existing folder is moved aside first, and moved back on failure."""
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
    return folder.with_name(f".{folder.name}.old-{os.getpid()}")


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def removed_after(temp: Path) -> Iterator[None]:
    """Remove `temp` before the block (an earlier process may have left it) and after it, also on errors."""
    remove(temp)
    try:
        yield
    finally:
        remove(temp)


def flush(path: Path) -> None:
    """Fsync a file, or a folder's directory entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
