"""The lock of a run's folder, since a second process would repeat lines and break checkpoints. The owner holds an flock
on a file that names the owner; the kernel releases the lock when the process ends, however it ends."""

import json
import logging
import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from lowmem_grpo.runs.files import SAID, fcntl, free_bytes, lock, refused
from lowmem_grpo.runs.records import RecordError

logger = logging.getLogger(__name__)
FILE, OWNER_BYTES = ".owner.json", 4096
BOOT = Path("/proc/sys/kernel/random/boot_id")
TRIES = 100  # for a file that is not there any more once it is locked; some file systems name a file anew each time


class RunInUseError(RecordError):
    """Raised if another process owns the run's folder; the message names that process, and says what to do."""


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Own the folder inside the block, and create it if missing. RunInUseError if another process owns it. Without
    locks in the file system, the process that the file names is the owner if it may be alive (`is_alive`)."""
    path = run_dir / FILE
    SAID.clear()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = locked(path)
        write_owner(file)
    except OSError as error:
        raise RecordError(refused(path, error, OWNER_BYTES, free_bytes(run_dir))) from error
    HELD.add(file)
    try:
        yield
    finally:
        HELD.discard(file)
        with suppress(OSError):  # on a disk that turned read-only; the lock is released anyway
            path.unlink()
        os.close(file)
        with suppress(OSError):
            if fcntl is None:  # Windows deletes no open file
                path.unlink()


HELD: set[int] = set()  # file descriptors of this process's locks


def close_in_child() -> None:
    """Close inherited lock files in a forked child, so that it does not keep the locks after the parent's end."""
    for file in HELD:
        os.close(file)
    HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=close_in_child)


def locked(path: Path) -> int:
    """Open and lock the file at `path`, and return its descriptor."""
    for left in reversed(range(TRIES)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)  # Windows lacks it
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):  # what is read from a pipe is waited for
                raise OSError("it is a pipe or a device, and no file")
            take(file, path)
            if is_at(file, path) or not left:
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # its former owner removed it meanwhile
    raise AssertionError("the last try returns")


def take(file: int, path: Path) -> None:
    """Lock an open file, or raise RunInUseError."""
    owner = read_owner(file)
    try:
        is_locked = lock(file, path)
    except BlockingIOError as error:
        raise RunInUseError(refusal(path, owner)) from error
    if not is_locked and owner and is_alive(owner):
        raise RunInUseError(f"{refusal(path, owner)}. This file system has no locks: if that process has ended, "
                            f"delete {path}")
    if owner and owner.get("host") != socket.gethostname():
        logger.warning("%s was left behind by %s, which ended without releasing the folder", path, said(owner))


def try_lock(file: int) -> bool | None:
    """Lock an open file or folder. Return False if another process has it, None if its file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (OSError, AttributeError):
        return None
    return True


def is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def is_alive(owner: dict[str, Any]) -> bool:
    """Return whether an owner may still be running; True for an owner on another machine."""
    if owner.get("host") != socket.gethostname():
        return True
    if owner.get("boot") != boot() or owner.get("pid") == os.getpid():
        return False
    if fcntl is None:
        return True  # on Windows, where kill would end the process
    try:
        number = int(owner["pid"])
        if number < 1:
            return False  # kill would address a process group
        os.kill(number, 0)
    except (ProcessLookupError, KeyError, ValueError, TypeError, OverflowError):
        return False
    except PermissionError:
        return True  # a process of another user
    return True


def boot() -> str:
    return BOOT.read_text().strip() if BOOT.is_file() else ""


def write_owner(file: int) -> None:
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "boot": boot(), "command": " ".join(sys.argv)[:200],
             "since": datetime.now().astimezone().isoformat(timespec="seconds")}
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)  # Windows has no pread and pwrite
    os.write(file, json.dumps(owner).encode(errors="replace"))


def read_owner(file: int) -> dict[str, Any]:
    """Return the owner that the file names; empty if there is none."""
    try:
        owner = json.loads(os.read(file, OWNER_BYTES))
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def refusal(path: Path, owner: dict[str, Any]) -> str:
    return (f"{path.parent} belongs to a run that is going on, of {said(owner)}. Wait for its end, stop it, or choose "
            "another output_dir")


def said(owner: dict[str, Any]) -> str:
    if not owner:
        return "a process that has not said its name"
    here = "" if owner.get("host") == socket.gethostname() else f" on {owner.get('host')}"
    return f"process {owner.get('pid')}{here} (since {owner.get('since')}: {owner.get('command')})"
