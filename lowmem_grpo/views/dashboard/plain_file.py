"""Files of a run that are read while somebody else writes them, and that may be anything: a link, a pipe, a device."""

import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

from lowmem_grpo.runs.records import json_object

LOG = "log.txt"  # a run's output, where somebody keeps it
MOST_BYTES, LOG_BYTES = 16 * 1024 * 1024, 16 * 1024  # read of a whole file, and of the end of a log
SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")  # colours and moves
INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def open_plain(path: Path) -> BinaryIO:
    """Return the open file. OSError where the last part of the path is a link, or where it is no regular file: a page
    shows what lies in the folder of a run, and does not wait for a pipe."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(number, "rb")


def json_file(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty where there is none that can be read."""
    try:
        with open_plain(path) as file:
            return json_object(file.read(MOST_BYTES))
    except (OSError, ValueError):
        return {}


def end_of(path: Path, most: int) -> bytes:
    """Return at most the last `most` bytes of a file; empty where there is none that can be read."""
    try:
        with open_plain(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most)
    except (OSError, ValueError):
        return b""


def log_tail(path: Path) -> str:
    """Return the last lines of a log; empty where there is none. Of a line that was written over, as by a progress bar,
    the last state is left, and what moves a terminal's cursor is left out."""
    said = end_of(path, LOG_BYTES)
    text = said.decode("utf-8", errors="replace")
    whole = text.partition("\n")[2] if len(said) == LOG_BYTES and "\n" in text else text
    return "\n".join(map(last_state, whole.split("\n")))


def last_state(line: str) -> str:
    """Return a line as a terminal has it in the end."""
    states = [state for state in SEQUENCE.sub("", line).split("\r") if state]
    return INVISIBLE.sub("", states[-1]) if states else ""
