"""`CheckpointStore`: weights that clients saved under a name, to continue training from or to sample with."""

import re
import sqlite3
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lowmem_grpo.runs.files import remove
from lowmem_grpo.server.server_dir import Database
from lowmem_grpo.server.tinker.adapters import LoraSettings
from lowmem_grpo.server.tinker.request_store import UnknownError, with_settings

TABLE = """CREATE TABLE IF NOT EXISTS tinker_saved (
    path TEXT PRIMARY KEY, owner TEXT NOT NULL, model TEXT NOT NULL, settings TEXT NOT NULL, file TEXT NOT NULL,
    size INTEGER NOT NULL, made REAL NOT NULL, expires REAL)"""
TRAINING, SAMPLING = "weights", "sampler_weights"  # as the protocol's paths have it
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True)
class Saved:
    """Named weights. Times are seconds since 1970."""

    path: str  # tinker://MODEL/weights/NAME, or tinker://MODEL/sampler_weights/NAME
    owner: str
    model: str
    settings: LoraSettings
    file: str  # below the store's folder: a safetensors file with moments, or a PEFT folder to sample with
    size: int
    made: float
    expires: float | None = None

    @property
    def kind(self) -> str:
        return self.path.split("/")[-2]


def path_of(model: str, kind: str, name: str) -> str:
    """Return the protocol's path of named weights. ValueError for an invalid or too long name."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"path is {name!r}; give a name of letters, digits and _.-, at most 128")
    return f"tinker://{model}/{kind}/{name}"


class CheckpointStore:
    """The store of named weights. Thread-safe."""

    def __init__(self, database: Database, folder: Path) -> None:
        database.add([TABLE])
        self.database, self.folder = database, folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sweep()

    def find(self, path: object, owner: str, kind: str | None = None) -> Saved:
        """Return the weights at a path. UnknownError if this user has none there, ValueError for another kind."""
        row = self.database.row("SELECT * FROM tinker_saved WHERE path = ? AND (expires IS NULL OR expires > ?)",
                                (str(path), time.time()))
        if row is None or row["owner"] != owner:
            raise UnknownError(f"path is {path!r}; there are no such weights of yours")
        saved = Saved(**with_settings(row))
        if kind == TRAINING != saved.kind:
            raise ValueError(f"path is {path!r}, which was saved to sample with; save_state saves what to train on")
        if kind == SAMPLING != saved.kind:
            raise ValueError(f"path is {path!r}, which was saved to train on; save_weights_for_sampler saves what to "
                             "sample with")
        return saved

    def all(self, owner: str, model: str | None = None) -> list[Saved]:
        """Return this user's weights, newest first, from one model or from all."""
        rows = self.database.rows("SELECT * FROM tinker_saved WHERE owner = ? AND (expires IS NULL OR expires > ?) "
                                  "ORDER BY made DESC, path", (owner, time.time()))
        return [saved for saved in (Saved(**with_settings(row)) for row in rows) if model in (None, saved.model)]

    def path_of(self, model: str, kind: str, name: str, seq: int) -> Path:
        """Return a path that only this request's weights use: older weights stay until the new ones are complete."""
        suffix = ".safetensors" if kind == TRAINING else ""
        return self.folder / f"{model.replace(':', '_')}.{kind}.{seq}.{name}{suffix}"

    def check_free(self, path: str, owner: str, overwrite: bool) -> None:
        """Raise ValueError if weights of this name exist and are not to be overwritten."""
        if not overwrite:
            with suppress(UnknownError):
                self.find(path, owner)
                raise ValueError(f"{path} is there already: give another name, or overwrite=True")

    def put(self, saved: Saved, connection: sqlite3.Connection) -> None:
        """Add a row, in the transaction that stores the request's answer."""
        values = vars(saved) | {"settings": saved.settings.model_dump_json()}
        marks = ", ".join("?" * len(values))
        connection.execute(f"INSERT OR REPLACE INTO tinker_saved ({', '.join(values)}) VALUES ({marks})",
                           tuple(values.values()))

    def delete(self, path: str, owner: str) -> None:
        """Delete weights, their row and their files. UnknownError if this user has none there."""
        saved = self.find(path, owner)
        self.database.change("DELETE FROM tinker_saved WHERE path = ?", (saved.path,))
        remove(self.folder / saved.file)

    def keep_for(self, path: str, owner: str, seconds: int | None) -> None:
        """Let weights expire in `seconds` from now; None keeps them. UnknownError if this user has none there."""
        saved = self.find(path, owner)
        self.database.change("UPDATE tinker_saved SET expires = ? WHERE path = ?",
                             (None if seconds is None else time.time() + seconds, saved.path))

    def expired(self) -> bool:
        return bool(self.database.rows("SELECT 1 FROM tinker_saved WHERE expires <= ? LIMIT 1", (time.time(),)))

    def sweep(self, used: Collection[str] = ()) -> None:
        """Delete expired weights, and files that were replaced or left by a kill, but not the files `used`."""
        self.database.change("DELETE FROM tinker_saved WHERE expires <= ?", (time.time(),))
        known = {row["file"] for row in self.database.rows("SELECT file FROM tinker_saved")}
        for path in self.folder.iterdir():
            if path.name not in known and path.name not in used:
                remove(path)


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; 0 if it does not exist."""
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())
