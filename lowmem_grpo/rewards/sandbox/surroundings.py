"""The surroundings of a sandboxed process: the command that starts it, directly or in bubblewrap's namespaces, and its
scratch directory: a folder, or in a namespace a tmpfs that ends with the process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from lowmem_grpo.rewards.sandbox.limits import Limits

BWRAP = "bwrap"
INSIDE = "import sys; sys.path.insert(0, {root!r}); from lowmem_grpo.rewards.sandbox.inside import main; main()"
HERE = Path(__file__).resolve().parents[2]  # the package's folder
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/urandom")
SCRATCH, ROOT = "/scratch", "/package"  # their paths inside a namespace
NOBODY = "65534"


def command(isolation: str, limits: Limits, descriptor: int, folder: str) -> tuple[list[str], dict[str, Any]]:
    """Return (command, paths). The command runs `inside.main` in Python without site-packages, environment or bytecode
    files. The paths are those that it sees: the scratch directory, the package, and what Landlock lets it read (None in
    a namespace). `descriptor` is the socket's; `folder` is the scratch directory for `process`."""
    bare = isolation == "process"
    root = str(HERE.parent) if bare else ROOT
    words = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-X", "utf8", "-c", INSIDE.format(root=root),
             str(descriptor)]
    if bare:
        return words, {"scratch": folder, "package": root, "readable": [*python_folders(), str(HERE), *DEVICES]}
    program = shutil.which(BWRAP) or BWRAP
    return [program, *bubblewrap(limits), "--", *words], {"scratch": SCRATCH, "package": ROOT, "readable": None}


def python_folders() -> list[str]:
    """Return the existing folders and files that Python needs to start, none of which lies inside another."""
    wanted = {path for path in (*SYSTEM, os.path.realpath(sys.base_prefix)) if os.path.exists(path)}
    return sorted(path for path in wanted if not any(path.startswith(f"{other}/") for other in wanted))


def bubblewrap(limits: Limits) -> list[str]:
    """Return bwrap's arguments (0.7 or newer, for --size): new namespaces, read-only except for the scratch tmpfs."""
    words = ["--unshare-all", "--unshare-user", "--uid", NOBODY, "--gid", NOBODY, "--hostname", "sandbox"]
    words += ["--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
    for option, paths in (("--ro-bind", python_folders()), ("--dev-bind", DEVICES)):
        words += [word for path in paths for word in (option, path, path)]
    words += ["--ro-bind", str(HERE), f"{ROOT}/{HERE.name}"]
    words += ["--size", str(limits.scratch_bytes), "--tmpfs", SCRATCH, "--chdir", SCRATCH]
    return [*words, "--remount-ro", "/"]


def usage_of_tmpfs(place: int) -> tuple[int, int]:
    """Return (files, bytes) in the tmpfs of a descriptor."""
    state = os.fstatvfs(place)
    return max(state.f_files - state.f_ffree - 1, 0), (state.f_blocks - state.f_bfree) * state.f_frsize


def usage_of_folder(folder: str, most: int) -> tuple[int, int]:
    """Return (files, bytes) in a folder, counted up to `most` files; more than `most` if it cannot be read."""
    waiting, entries, size = [folder], 0, 0
    try:
        while waiting and entries <= most:
            for entry in list(os.scandir(waiting.pop())):
                entries += 1
                size += entry.stat(follow_symlinks=False).st_blocks * 512
                waiting += [entry.path] if entry.is_dir(follow_symlinks=False) else []
    except FileNotFoundError:
        pass  # removed while we looked
    except OSError:
        return most + 1, size
    return entries, size


def remove(folder: str) -> None:
    """Remove a folder with all its content. The second try is for write-protected and very deep directories."""
    shutil.rmtree(folder, ignore_errors=True)
    if Path(folder).exists():
        for words in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*words, folder], stderr=subprocess.DEVNULL, check=False)
