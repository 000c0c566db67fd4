"""`ServerDir`: a server's folder, with its `Database`, address and jobs; `ServerClient`: requests to a server."""

import contextlib
import http.client
import json
import logging
import math
import os
import re
import sqlite3
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowmem_grpo.runs.files import check_folder, lock_file, move
from lowmem_grpo.server.users import key_fault, new_key
from lowmem_grpo.utils import MIB, JsonError, bytes_of, read_json

logger = logging.getLogger(__name__)
DEFAULT = Path("~/.lowmem-grpo")
DATABASE, ADDRESS, LOCK, JOBS, MODELS = "server.sqlite", "server.json", "server.lock", "jobs", "models"
OTHERS = 0o077  # the rights of a file's group and of all others
SECONDS = 60.0  # until a request is given up
WAITS = 30.0  # seconds to wait for another process that writes
Row = dict[str, Any]


@dataclass(frozen=True)
class Address:
    """The URL of a server, and its owner's key."""

    url: str
    key: str


class Database:
    """A thread-safe SQLite file with a write-ahead log. `tables` are `CREATE TABLE IF NOT EXISTS` statements."""

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
        with self.write() as connection:
            for statement in tables:
                connection.execute(statement)

    def wait_for_disk(self, waits: bool) -> None:
        """Set whether later commits wait until the data is on the disk."""
        if waits != self.waits:
            self.connection.execute(f"PRAGMA synchronous={'FULL' if waits else 'NORMAL'}")
            self.waits = waits

    @contextlib.contextmanager
    def write(self, waits: bool = True) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction, rolled back on any error. OSError if the disk refuses it. A committed
        transaction survives a kill, and with `waits` also a power cut."""
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


class ServerDir:
    """The folder of a server, locked so that one server at a time uses it."""

    def __init__(self, folder: Path) -> None:
        self.named = folder.expanduser()  # as its user wrote it
        self.folder = self.named.absolute()

    @contextlib.contextmanager
    def owned(self) -> Iterator[Database]:
        """Create the folder if missing, lock it, and yield its database. OSError if another server holds the lock. What
        this process and its jobs write meanwhile is for this user only."""
        check_folder(self.named, "--folder")
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        before = os.umask(OTHERS)
        try:
            with self.locked() as database:
                yield database
        finally:
            os.umask(before)

    @contextlib.contextmanager
    def locked(self) -> Iterator[Database]:
        try:
            lock = lock_file(self.folder / LOCK)
        except BlockingIOError:
            raise OSError(f"another server has {self.folder}: use that one, stop it, or give --folder another "
                          "one") from None
        self.close_to_others()
        database = Database(self.folder / DATABASE)
        try:
            yield database
        finally:
            database.close()
            os.close(lock)

    def close_to_others(self) -> None:
        """Take the rights of others from the server's files: earlier versions left them readable."""
        for name in (f"{DATABASE}*", ADDRESS, LOCK, JOBS, f"{JOBS}/**/*", MODELS, f"{MODELS}/**/*"):
            for path in self.folder.glob(name):
                with contextlib.suppress(FileNotFoundError):  # a job that goes on deletes old checkpoints
                    mode = path.lstat().st_mode
                    if mode & OTHERS and not stat.S_ISLNK(mode):
                        path.chmod(stat.S_IMODE(mode) & ~OTHERS)

    @property
    def jobs(self) -> Path:
        return self.folder / JOBS

    @property
    def models(self) -> Path:
        return self.folder / MODELS

    def key(self) -> str:
        """Return the owner's key: the saved one, so that it survives restarts, or else a new one. A warning says if the
        saved one cannot be used."""
        path = self.folder / ADDRESS
        try:
            status = path.stat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise OSError(f"{path} can be changed by other users of this machine")
            key = read_address(path).key
            if fault := key_fault(key):
                raise OSError(f"{path}: the key {fault}")
            return key
        except FileNotFoundError:
            return new_key()
        except OSError as error:
            logger.warning("%s. A new key is made: other computers need a new copy of %s", error, ADDRESS)
            return new_key()

    def announce(self, address: Address) -> Path:
        """Write the address to a file that only its owner can read, for the owner's commands; return the path."""
        path = self.folder / ADDRESS
        aside = path.with_suffix(".new")
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()
        file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(file, "w", encoding="utf-8") as written:
            json.dump(asdict(address), written)
        move(aside, path)
        return path


def read_address(path: Path) -> Address:
    """Read a server's address from its folder or its address file. OSError if there is none or it is damaged."""
    path = path.expanduser()
    try:
        address = read_json(bytes_of(path / ADDRESS if path.is_dir() else path, MIB), any_number=True)
        if not re.fullmatch("[!-~]+", str(address["key"])) or not isinstance(address["key"], str):
            raise ValueError("the key is no text of letters, digits and signs")
        if not isinstance(address["url"], str) or not re.fullmatch("https?://.{0,1000}", address["url"]):
            raise ValueError(f"url is {address['url']!r:.80}, where http://ADDRESS should be")
        return Address(address["url"], address["key"])
    except FileNotFoundError:
        raise OSError(f"no server is known here ({path}): start one with `lowmem-grpo serve`, or copy the server.json "
                      "of another machine's and give it with --server") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        said = error if isinstance(error, ValueError) else repr(error)
        raise OSError(f"{path} does not say where a server is ({said}); `lowmem-grpo serve` writes it anew") from None


class RemoteError(RuntimeError):
    """Raised if the server refused a request or could not be reached; the message says why."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    def __init__(self, address: Address) -> None:
        self.address = address
        # ignore HTTP_PROXY and its like: the server is reached directly
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str) -> Any:
        return self.parsed(self.ask(path))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.parsed(self.ask(path, json.dumps(body).encode()))

    def parsed(self, reply: bytes) -> Any:
        try:
            return read_json(reply, math.inf, nul=True, any_number=True)
        except JsonError as error:
            raise RemoteError(f"{self.address.url} does not answer as `lowmem-grpo serve` does ({error}); give "
                              "--server the server.json of one that does") from None

    def ask(self, path: str, body: bytes | None = None) -> bytes:
        """Return the reply to a GET, or to a POST if `body` is given. Raises RemoteError."""
        headers = {"X-API-Key": self.address.key, "Content-Type": "application/json"}
        try:
            request = urllib.request.Request(f"{self.address.url}{path}", data=body, headers=headers)
            with self.opener.open(request, timeout=SECONDS) as reply:
                return bytes(reply.read())
        except urllib.error.HTTPError as error:
            raise RemoteError(words_of(error), error.code) from None
        except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError for a URL that is none
            cause = getattr(error, "reason", None) or error
            raise RemoteError(f"the server at {self.address.url} is not reached ({cause}): start it with `lowmem-grpo "
                              "serve`, or its tunnel if it is on another machine") from None


def words_of(error: urllib.error.HTTPError) -> str:
    try:
        return str(read_json(error.read(MIB), MIB)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"the server answered {error.code} {error.reason}"
