"""The folder of a server: its database, what it saves, and where it can be reached."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lowmem_grpo.service.database import Database
from lowmem_grpo.service.users import new_key

DEFAULT = Path("~/.lowmem-grpo")
DATABASE, ADDRESS, LOCK, JOBS = "server.sqlite", "server.json", "server.lock", "jobs"


@dataclass(frozen=True)
class Address:
    """The address of a server, and the key of who started it."""

    url: str
    key: str


class Home:
    """One server at a time has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser()

    @contextlib.contextmanager
    def owned(self) -> Iterator[Database]:
        """Inside, this process has the folder, which is made if need be. OSError where another server has it."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise OSError(f"another server has {self.folder}: use that one, stop it, or give --folder another "
                          "one") from None
        database = Database(self.folder / DATABASE)
        try:
            yield database
        finally:
            database.close()
            os.close(lock)

    @property
    def jobs(self) -> Path:
        return self.folder / JOBS

    def key(self) -> str:
        """The key of who started the server, which stays from one start to the next."""
        try:
            return read_address(self.folder / ADDRESS).key
        except OSError:
            return new_key()

    def announce(self, address: Address) -> Path:
        """Write down where the server is, for the commands of who started it; nobody else can read it."""
        path = self.folder / ADDRESS
        aside = path.with_suffix(".new")
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()
        file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(file, "w", encoding="utf-8") as written:
            json.dump(asdict(address), written)
        os.replace(aside, path)
        return path


def read_address(path: Path) -> Address:
    """Return the address of a server. OSError where nothing says so."""
    path = path.expanduser()
    try:
        address = json.loads((path / ADDRESS if path.is_dir() else path).read_text(encoding="utf-8"))
        return Address(str(address["url"]), str(address["key"]))
    except FileNotFoundError:
        raise OSError(f"no server is known here ({path}): start one with `lowmem-grpo serve`, or copy the server.json "
                      "of another machine's and give it with --server") from None
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"{path} does not say where a server is ({error!r}); `lowmem-grpo serve` writes it "
                      "anew") from None
