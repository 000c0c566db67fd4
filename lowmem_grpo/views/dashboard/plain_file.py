"""Files of a run that are read while somebody else writes them, and that may be anything: a link, a pipe, a device."""

import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from lowmem_grpo.runs.records import json_object

MOST_BYTES = 16 * 1024 * 1024  # of a file that is read as a whole


def open_plain(path: Path) -> BinaryIO:
    """The open file. OSError where the last part of the path is a link, or where it is no regular file: a page shows
    what lies in the folder of a run, and does not wait for a pipe."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(number, "rb")


def json_file(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none that can be read."""
    try:
        with open_plain(path) as file:
            return json_object(file.read(MOST_BYTES))
    except (OSError, ValueError):
        return {}


def end_of(path: Path, most: int) -> bytes:
    """At most the last `most` bytes of a file; empty where there is none that can be read."""
    try:
        with open_plain(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most)
    except (OSError, ValueError):
        return b""
