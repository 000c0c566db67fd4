"""A file of records that grows: what was appended since the last look."""

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowmem_grpo.runs.records import finite, step_record
from lowmem_grpo.views.dashboard.plain_file import open_plain

Record = dict[str, Any]

PIECE = 1024 * 1024  # bytes that are read at a time
LONGEST_LINE = 16 * 1024 * 1024  # bytes; what is longer is no record of a run
LAST_STEP = 2**53  # of a run: a page's script counts no further


class Appended:
    """Reads a JSON lines file from where it stopped. A line that is not whole yet is left for the next look, and one
    that is damaged or too long is counted and left out: a page goes on where a report would refuse."""

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        """With `last_bytes`, what lies further before the end at the first look is not read."""
        self.path, self.last_bytes = path, last_bytes
        self.file: tuple[int, int] | None = None  # which file was read: device and inode
        self.place, self.size, self.skipped, self.damaged = 0, 0, 0, 0  # bytes, and lines
        self.inside = False  # in a line of which the rest is not read either
        self.more = False  # whether the last look ended before the file did

    def look(self) -> bool:
        """Whether the file is another one than before, as after a resume, so that everything is to be read anew."""
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

    def records(self, until: float = math.inf) -> Iterator[tuple[Record, int]]:
        """The records after `place`, which moves on with each, and the bytes of their lines. No further piece is begun
        after the time `until` (of `time.monotonic`)."""
        self.more = False
        try:
            file = open_plain(self.path)
        except OSError:
            return
        with file:
            status = os.fstat(file.fileno())
            if (status.st_dev, status.st_ino) != self.file:
                return  # another one since the last look
            file.seek(self.place)
            rest = b""
            while piece := file.read(PIECE):
                *whole, rest = (rest + piece).split(b"\n")
                for line in whole:
                    yield from self.record(line)
                if self.inside or len(rest) > LONGEST_LINE:
                    rest = self.leave_out(rest)
                if (whole or not rest) and time.monotonic() > until:
                    self.more = True
                    return

    def record(self, line: bytes) -> Iterator[tuple[Record, int]]:
        """A whole line's record; none for an empty or a damaged one, or for the end of one that is left out."""
        self.place += len(line) + 1
        if self.inside or not line.strip():
            self.inside = False
            return
        try:
            yield checked(step_record(line)), len(line)
        except ValueError:
            self.damaged += 1

    def leave_out(self, rest: bytes) -> bytes:
        """Go on behind the beginning of a line that is too long, or that began before the first byte that is read."""
        self.damaged += not self.inside
        self.inside = True
        self.place += len(rest)
        return b""


def checked(record: Record) -> Record:
    """The record with a step that is a whole number, and without infinities. ValueError where the step is none."""
    if not 0 <= record["step"] <= LAST_STEP:  # NaN and infinity neither
        raise ValueError(f"the step is {record['step']}; it must be a whole number from 0 on")
    found: Record = finite(record)
    return found | {"step": int(record["step"])}
