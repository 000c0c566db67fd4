"""Files that a run writes meanwhile, and that may be anything: a link, a pipe; `JsonlTail`: the records of one."""

import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

from lowmem_grpo.runs.records import finite, json_object, step_record

LOG = "log.txt"  # a run's output, where somebody keeps it
MOST_BYTES, LOG_BYTES = 16 * 1024 * 1024, 16 * 1024  # read of a whole file, and of the end of a log
SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")  # colours and moves
INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
Record = dict[str, Any]
PIECE = 4 * 1024 * 1024  # bytes that are read at a time; a longer line is no record of a run
LAST_STEP = 2**53  # a page's script counts no further


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


class JsonlTail:
    """Reads a JSON lines file from where it stopped. A line that is not whole yet is left for the next time, and one
    that is damaged or too long is counted and left out: a page goes on where a report would refuse."""

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        """With `last_bytes`, what lies further before the end at the beginning is not read."""
        self.path, self.last_bytes = path, last_bytes
        self.file: tuple[int, int] | None = None  # which file was read: device and inode
        self.place, self.size, self.skipped, self.damaged = 0, 0, 0, 0  # bytes, and lines
        self.inside = False  # in a line of which the rest is not read either
        self.more = False  # whether the last piece ended before the file did

    def is_new_file(self) -> bool:
        """Return whether the file is another one than before, as after a resume, so that everything is read anew."""
        try:
            status = self.path.lstat()
        except OSError:
            return False
        file, self.size = (status.st_dev, status.st_ino), status.st_size
        if file == self.file and self.size >= self.place:
            return False
        self.file, self.damaged = file, 0
        self.place = self.skipped = max(0, self.size - self.last_bytes) if self.last_bytes else 0
        self.inside = self.skipped > 0
        return True

    def read_records(self) -> list[Record]:
        """Return the records of the next piece, behind which `place` moves."""
        piece = self.read_piece()
        self.more = len(piece) == PIECE
        whole, end, _ = piece.rpartition(b"\n")
        if not end and not self.more:
            return []  # nothing new, or a line that is still being written
        if not end:
            self.damaged += not self.inside
            self.inside, self.place = True, self.place + len(piece)
            return []
        lines = whole.split(b"\n")[self.inside :]
        self.inside, self.place = False, self.place + len(whole) + 1
        return [record for line in lines for record in self.checked_records(line)]

    def read_piece(self) -> bytes:
        """Return the next bytes; none where the file is gone, or another one by now."""
        try:
            with open_plain(self.path) as file:
                status = os.fstat(file.fileno())
                file.seek(self.place)
                return file.read(PIECE) if (status.st_dev, status.st_ino) == self.file else b""
        except OSError:
            return b""

    def checked_records(self, line: bytes) -> list[Record]:
        """Return a line's record, finite, its step a whole number; nothing if it is empty, or damaged and counted."""
        try:
            record = step_record(line) if line.strip() else None
        except ValueError:
            record = {"step": -1}
        if record is not None and not 0 <= record["step"] <= LAST_STEP:  # NaN and infinity neither
            self.damaged += 1
            return []
        return [] if record is None else [finite(record) | {"step": int(record["step"])}]
