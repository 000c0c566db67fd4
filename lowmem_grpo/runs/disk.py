"""What a disk refused, in words: the cause, and what to do about it."""

import errno
import os
import re
import shutil
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
    """The path itself, or the nearest folder above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def free_bytes(path: Path) -> int | None:
    """Free bytes on the disk of a path, which need not exist yet; None where the disk does not say."""
    try:
        return shutil.disk_usage(existing(path)).free
    except OSError:
        return None


def number_of(error: Exception) -> int | None:
    """The system's number of an error; safetensors has it only in its text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else None


def refused(path: Path, error: Exception, needed: int, free: int | None) -> str:
    """What to tell a user whose disk refused `needed` bytes at `path`, when `free` were free before."""
    number = number_of(error)
    words = str(error) if number is None else os.strerror(number)
    return f"{path} was not written: {words}; {advice(number, needed, free)}"


def advice(number: int | None, needed: int, free: int | None) -> str:
    """What to do. A disk can be full although it has room: by a quota, or because it can hold no more files."""
    if number != errno.ENOSPC:
        return ADVICE.get(number or 0, "mend that, or choose another output_dir")
    if free is None or free < needed:
        return f"it needs about {needed:,} bytes{'' if free is None else f' and {free:,} were free'}: make room"
    return (f"it needs about {needed:,} bytes, and {free:,} were free before. So either something else filled the disk "
            "at the same time, or a quota or the number of files (`df -i`) is at its limit: make room there")
