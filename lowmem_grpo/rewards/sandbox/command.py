"""The command line of each isolation, and the folders that Python needs. Nothing is started here."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from lowmem_grpo.rewards.sandbox.limits import Limits

PROGRAMS = {"bubblewrap": "bwrap"}
INSIDE = "import sys; sys.path.insert(0, {root!r}); from lowmem_grpo.rewards.sandbox.inside import main; main()"
HERE = Path(__file__).resolve().parents[2]  # the package's folder
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/urandom")
SCRATCH, ROOT = "/scratch", "/package"  # their paths inside a namespace
NOBODY = 65534


@dataclass(frozen=True)
class Command:
    """The command of a sandboxed Python, and the paths that it sees."""

    words: list[str]
    scratch: str
    package: str
    readable: list[str] | None  # for Landlock, if there is no namespace


def python_folders() -> list[str]:
    """Return the existing folders and files that Python needs to start, none of which lies inside another."""
    wanted = {path for path in (*SYSTEM, os.path.realpath(sys.base_prefix)) if os.path.exists(path)}
    return sorted(path for path in wanted if not any(path.startswith(f"{other}/") for other in wanted))


def python(root: str, descriptor: int) -> list[str]:
    """Return Python without site-packages, environment or bytecode files, running `inside.main`."""
    code = INSIDE.format(root=root)
    return [os.path.realpath(sys.executable), "-I", "-S", "-B", "-X", "utf8", "-c", code, str(descriptor)]


def command(isolation: str, limits: Limits, descriptor: int, scratch: str) -> Command:
    """Return the command of an isolation. `descriptor` is the socket's number, `scratch` the folder for `process`."""
    if isolation == "process":
        root = str(HERE.parent)
        readable = [*python_folders(), str(HERE), *DEVICES]
        return Command(python(root, descriptor), scratch, root, readable)
    program = shutil.which(PROGRAMS[isolation]) or PROGRAMS[isolation]
    words = [program, *bubblewrap(limits, descriptor), "--", *python(ROOT, descriptor)]
    return Command(words, SCRATCH, ROOT, None)


def bubblewrap(limits: Limits, descriptor: int) -> list[str]:
    """Arguments of bwrap (0.7 or newer, for --size): new namespaces, and all is read-only except the scratch tmpfs."""
    words = ["--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox"]
    words += ["--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
    for path in python_folders():
        words += ["--ro-bind", path, path]
    for path in DEVICES:
        words += ["--dev-bind", path, path]
    words += ["--ro-bind", str(HERE), f"{ROOT}/{HERE.name}"]
    words += ["--size", str(limits.scratch_bytes), "--tmpfs", SCRATCH, "--chdir", SCRATCH]
    return [*words, "--remount-ro", "/"]
