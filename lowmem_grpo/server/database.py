"""`Database`: the server state that survives a kill, in one SQLite file."""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WAITS = 30.0  # seconds to wait for another process that writes
Row = dict[str, Any]


class Database:
    """An SQLite file with a write-ahead log: a transaction that `write` committed survives the process. A lock lets one
    thread use it at a time. `tables` are statements that can run repeatedly (`CREATE TABLE IF NOT EXISTS`)."""

    def __init__(self, path: Path, tables: Sequence[str] = ()) -> None:
        """Open or create the file, readable by its owner only. OSError if that fails or the file is not a database."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        self.path, self.lock = path, threading.RLock()
        # autocommit: only `write` begins and ends transactions, never sqlite3 itself
        self.connection = sqlite3.connect(path, timeout=WAITS, isolation_level=None, check_same_thread=False)
        self.connection.row_factory = sqlite3.Row
        self.waits: bool | None = None
        try:
            self.connection.execute("PRAGMA journal_mode=WAL")
            self.wait_for_disk(True)
            self.connection.execute("PRAGMA foreign_keys=ON")
            self.add(tables)
        except sqlite3.DatabaseError as error:
            self.connection.close()
            raise OSError(f"{path} cannot be used as the server's database: {error}. Move it away, and a new one is "
                          "made; what it held is then not known") from error

    def add(self, tables: Sequence[str]) -> None:
        """Create the tables of these statements."""
        with self.write() as connection:
            for statement in tables:
                connection.execute(statement)

    def wait_for_disk(self, waits: bool) -> None:
        """Set whether later commits wait until the data is on the disk."""
        if waits != self.waits:
            self.connection.execute(f"PRAGMA synchronous={'FULL' if waits else 'NORMAL'}")
            self.waits = waits

    @contextmanager
    def write(self, waits: bool = True) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction, rolled back on any error. OSError if the disk refuses it. Without `waits`
        the transaction survives a kill, but a power cut only after the next commit that waits for the disk."""
        with self.lock:
            try:
                self.wait_for_disk(waits)
                self.connection.execute("BEGIN IMMEDIATE")
                yield self.connection
                self.connection.execute("COMMIT")
            except sqlite3.OperationalError as error:
                self.undo()
                raise OSError(f"{self.path} was not written: {error}; make room on its disk, or mend that") from error
            except BaseException:
                self.undo()
                raise

    def change(self, statement: str, values: Sequence[Any], waits: bool = True) -> int:
        """Run one statement as a transaction, and return how many rows it changed."""
        with self.write(waits) as connection:
            return connection.execute(statement, values).rowcount

    def undo(self) -> None:
        """Roll back the open transaction, if there is one."""
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[Row]:
        with self.lock:
            return [dict(row) for row in self.connection.execute(query, values)]

    def row(self, query: str, values: Sequence[Any] = ()) -> Row | None:
        rows = self.rows(query, values)
        return rows[0] if rows else None

    def close(self) -> None:
        with self.lock:
            self.connection.close()
