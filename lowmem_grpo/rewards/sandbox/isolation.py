"""The choice of an isolation that works on this machine, after a trial run."""

import logging
import platform
import sys
import time
from dataclasses import dataclass, field
from functools import cache

from lowmem_grpo.rewards.sandbox.limits import Limits
from lowmem_grpo.rewards.sandbox.worker import START_SECONDS, CannotStart, Worker, WorkerEnded

ISOLATIONS = ("bubblewrap", "process")
BY_DEFAULT = "bubblewrap"
PROCESS_WARNING = (
    'isolation="process" limits model-written code, but if the kernel lacks Landlock 3 (Linux 6.2) the code can read, '
    "write or empty your files and look into your other processes; on every kernel it sees which files exist, how "
    "large and how old they are, and files that it removes while they are open do not count towards scratch_bytes; do "
    "not use it on a machine with secrets"
)
FIX = (
    "install bubblewrap 0.7 or newer (apt install bubblewrap, dnf install bubblewrap); in a container allow user "
    "namespaces (docker run --security-opt seccomp=unconfined --security-opt systempaths=unconfined); or accept less "
    'protection with isolation="process": limits on time, memory, processes and network hold there too, but if the '
    "kernel lacks Landlock 3 (Linux 6.2) the code can read and write your files"
)
WORKS = "works"
PROBE = "def probe(number):\n    return number + 1\n"
logger = logging.getLogger(__name__)


class SandboxError(RuntimeError):
    """The wanted isolation does not work here; the message says why and what to do."""


@dataclass(frozen=True)
class Sandbox:
    """An isolation that works on this machine, and the limits of the code that runs in it."""

    isolation: str
    limits: Limits = field(default_factory=Limits)

    def start(self, role: str, code: str, **more: object) -> Worker:
        """Return a new sandboxed process with an order for `inside`. worker.CannotStart if it does not start."""
        return Worker(self.isolation, self.limits, {"role": role, "code": code, **more})


def open_sandbox(isolation: str | None = None, limits: Limits | None = None) -> Sandbox:
    """Return a sandbox with this isolation (None: bubblewrap), after a trial run. ValueError for an unknown name,
    SandboxError if the isolation does not work here."""
    if isolation is not None and isolation not in ISOLATIONS:
        raise ValueError(f"isolation is {isolation!r}; allowed are {', '.join(ISOLATIONS)}, or None for {BY_DEFAULT}")
    if not isinstance(limits, Limits | None):
        raise ValueError(f"limits is {limits!r}; it must be a Limits, as Limits(seconds=5), or None")
    name = isolation or BY_DEFAULT
    if (fault := why_not(name)) is not None:
        raise SandboxError(f"no sandbox for model-written code ({name}: {fault}). What to do: {FIX}")
    if name == "process":
        warn_of_process()
    return Sandbox(name, limits or Limits())


@cache
def why_not(isolation: str) -> str | None:
    """Return the reason why an isolation does not work here; None if it works. It is tried once, on a small program."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"needs Linux on x86_64 or aarch64, this is {sys.platform} on {platform.machine()}"
    limits = Limits()
    try:
        with Worker(isolation, limits, {"role": "serve", "code": PROBE}) as worker:
            deadline = time.monotonic() + START_SECONDS
            worker.receive(deadline)
            worker.send({"call": "probe", "args": {"tuple": [1]}, "kwargs": {"dict": []}}, deadline)
            reply = worker.receive(deadline)
    except (CannotStart, WorkerEnded) as error:
        return str(error) or "it ended without a message"
    return None if reply == {"value": 2} else f"a trial run answered {reply}"


@cache
def warn_of_process() -> None:
    logger.warning(PROCESS_WARNING)


def what_works() -> str:
    """Return one line for `doctor`: the default isolation if it works, and the state of the others."""
    states = {name: " ".join((why_not(name) or WORKS).split())[:120] for name in ISOLATIONS}
    works = [name for name, state in states.items() if state == WORKS]
    taken = BY_DEFAULT if BY_DEFAULT in works else "none by default, process if asked for" if works else "none"
    return f"{taken} ({'; '.join(f'{name}: {state}' for name, state in states.items() if name != taken)})"
