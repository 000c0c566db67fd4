"""What a judge said before: in memory and, if wanted, in a file that outlives the run."""

import json
import logging
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from lowmem_grpo.rewards.judge.question import Ratings
from lowmem_grpo.rewards.judge.replies import REASON, is_number, writable

logger = logging.getLogger(__name__)


class Cache:
    """Ratings by key: in memory the last `size` that were used, and in a JSONL file all that were ever added.

    The file is read once, and its last lines are kept. Damaged lines are skipped, with a warning. If the file can no
    longer be written, a warning says so once, and the memory stays in use. Safe between threads.
    """

    def __init__(self, size: int = 10_000, path: str | Path | None = None) -> None:
        """Raises ValueError for a negative size, for size 0 with a path, and for a path that cannot be read."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"cache_size is {size!r}; it must be a number of entries, 0 for no cache in memory")
        if path is not None and not size:
            raise ValueError(f"cache_size is 0 and cache_file is {str(path)!r}: what the file holds is kept in the "
                             "cache's memory; give a cache_size of 1 or more, or no cache_file")
        if path is not None and not (isinstance(path, str | os.PathLike) and "\0" not in os.fspath(path)):
            raise ValueError(f"cache_file is {path!r}; it must be the path of a file, or None")
        self.size, self.path = size, None if path is None else Path(path)
        self.found: OrderedDict[str, Ratings] = OrderedDict()
        self.lock = threading.Lock()
        if self.path is not None:
            self.load(self.path)

    def load(self, path: Path) -> None:
        if path.exists() and not path.is_file():  # a pipe or a device may have no end
            raise ValueError(f"cache_file {path} cannot be used: it is no ordinary file; give the path of a file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_bytes().split(b"\n") if path.exists() else []
        except OSError as error:
            raise ValueError(f"cache_file {path} cannot be used: {error}; give the path of a file") from error
        damaged = 0
        for line in filter(None, map(bytes.strip, lines)):
            entry = entry_of(line)
            if entry is None:
                damaged += 1
            else:
                self.remember(*entry)
        if damaged:
            logger.warning("cache_file %s: skipped %d damaged lines; what they held is judged again", path, damaged)

    def get(self, key: str, count: int) -> Ratings | None:
        """The ratings of `count` answers, if they are known."""
        with self.lock:
            ratings = self.found.get(key)
            if ratings is None or len(ratings) != count:
                return None
            self.found.move_to_end(key)
            return ratings

    def put(self, key: str, ratings: Ratings) -> None:
        """Keep ratings, and add them to the file."""
        with self.lock:
            self.remember(key, ratings)
            if self.path is not None:
                self.append(self.path, json.dumps({"key": key, "ratings": ratings}))

    def remember(self, key: str, ratings: Ratings) -> None:
        self.found[key] = ratings
        self.found.move_to_end(key)
        while len(self.found) > self.size:
            self.found.popitem(last=False)

    def append(self, path: Path, line: str) -> None:
        """Add a line, on a new line even if an earlier run did not finish its last one."""
        try:
            with path.open("ab+") as file:
                if file.tell():
                    file.seek(-1, 2)
                    line = line if file.read(1) == b"\n" else "\n" + line
                file.write(line.encode() + b"\n")
        except OSError as error:
            logger.warning("cache_file %s cannot be written (%s): nothing more is added to it", path, error)
            self.path = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.Lock())


def entry_of(line: bytes) -> tuple[str, Ratings] | None:
    """(key, ratings) of a line of the file; None if it is damaged."""
    try:
        held = json.loads(line)
        key, ratings = held["key"], [(score, reason) for score, reason in held["ratings"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    sound = isinstance(key, str) and all(is_number(score) and isinstance(reason, str) for score, reason in ratings)
    kept = [(float(score), writable(reason[:REASON])) for score, reason in ratings] if sound else []
    return (key, kept) if kept else None
