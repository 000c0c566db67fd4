"""The scratch directory of a sandboxed process: its usage and its removal.

In a namespace it is a tmpfs, which ends with the process. With `isolation="process"` it is a folder, which its owner
locks while it lives. If the owner is killed, the kernel releases the lock, and the next program that starts a sandbox
removes the folder.
"""

import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

PREFIX = "lowmem-grpo-sandbox-"


class ScratchFolder:
    """A new folder in the system's temporary directory. `remove` deletes it, or else a later `sweep`."""

    def __init__(self) -> None:
        sweep(tempfile.gettempdir())
        folder = tempfile.mkdtemp(prefix=f".{PREFIX}")  # under a name that no sweep takes, until it is locked
        self._lock = open_folder(folder)
        with contextlib.suppress(OSError):  # a file system without locks, where no sweep removes anything
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = folder.replace(f".{PREFIX}", PREFIX)
        os.rename(folder, self.path)

    def usage(self, most: int) -> tuple[int, int]:
        """Return (files, bytes) in the folder, counted up to `most` files; more than `most` if it cannot be read."""
        waiting, entries, size = [self.path], 0, 0
        try:
            while waiting and entries <= most:
                with os.scandir(waiting.pop()) as listing:
                    for entry in listing:
                        entries += 1
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                        if entries > most:
                            break
        except FileNotFoundError:
            pass  # removed while we looked
        except OSError:
            return most + 1, size
        return entries, size

    def remove(self) -> None:
        remove(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def open_folder(folder: str) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


@functools.cache
def sweep(below: str) -> None:
    """Remove the scratch folders in `below` that killed programs of this user have left; done once per program."""
    with contextlib.suppress(OSError), os.scandir(below) as listing:
        for entry in listing:
            if entry.name.startswith(PREFIX) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                remove_unowned(entry.path)


def remove_unowned(folder: str) -> None:
    """Remove a folder if no process holds its lock."""
    with contextlib.suppress(OSError):
        place = open_folder(folder)
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(folder)
        finally:
            os.close(place)


def remove(folder: str) -> None:
    """Remove a folder with all its content. The second try is for write-protected and very deep directories."""
    shutil.rmtree(folder, ignore_errors=True)
    if Path(folder).exists():
        subprocess.run(["chmod", "-R", "u+rwx", folder], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


def usage_of_tmpfs(place: int) -> tuple[int, int]:
    """Return (files, bytes) in the tmpfs of a descriptor."""
    state = os.fstatvfs(place)
    return max(state.f_files - state.f_ffree - 1, 0), (state.f_blocks - state.f_bfree) * state.f_frsize
