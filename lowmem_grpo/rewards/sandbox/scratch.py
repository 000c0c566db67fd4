"""The scratch directory of a sandboxed process: its usage and its removal.

In a namespace it is a tmpfs, which ends with the process. With `isolation="process"` it is a folder. That of a program
that was killed is removed by the first sandbox of a program that starts a day later.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

PREFIX = "lowmem-grpo-sandbox-"
OLD_SECONDS = 86_400.0  # without a change, far longer than any process in a sandbox lives


class ScratchFolder:
    """A new folder in the system's temporary directory. `remove` deletes it, or else a later `sweep`."""

    def __init__(self) -> None:
        sweep(tempfile.gettempdir())
        self.path = tempfile.mkdtemp(prefix=PREFIX)

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


@functools.cache
def sweep(below: str) -> None:
    """Remove the old scratch folders in `below` that killed programs of this user have left; done once per program."""
    with contextlib.suppress(OSError), os.scandir(below) as listing:
        for entry in listing:
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                state = entry.stat(follow_symlinks=False)
                if state.st_uid == os.getuid() and time.time() - state.st_mtime > OLD_SECONDS:
                    remove(entry.path)


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
