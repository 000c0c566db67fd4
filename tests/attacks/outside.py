"""What lies outside of the sandbox, and what an attack has changed of it."""

import ctypes
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from lowmem_grpo.rewards.sandbox.rights import MACHINES, OURS

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.shmat.restype = ctypes.c_void_p
IPC_RMID, IPC_STAT, GETVAL, NEW = 0, 2, 12, 0o1600
SIZE = 4096  # bytes of the shared memory
CATCHABLE = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGINT, signal.SIGALRM}
VICTIM = """
import ctypes, signal, struct, time
ctypes.CDLL(None).syscall(ctypes.c_long({}), struct.pack("Ii", 0x20080522, 0), bytes(24))  # as weak as its attackers
for number in set(signal.Signals) - {{signal.SIGKILL, signal.SIGSTOP}}:
    signal.signal(number, lambda number, frame: print(number, flush=True))
print("ready", flush=True)
while True:
    time.sleep(60)
"""


class Outside:
    """The trainer (this process), a victim process, a file, a secret, sockets, and memory that processes share.

    `names` are what an attack is told: a real one could guess or find them.
    """

    def __init__(self, folder: Path, victim: subprocess.Popen[bytes], stack: ExitStack) -> None:
        self.folder, self.victim, self.mark = folder, victim, f"escaped-{os.urandom(6).hex()}"
        self.signals: list[int] = []  # that came to this process
        self.file, self.secret = folder / "precious.txt", f"hunter2-{os.urandom(8).hex()}"
        self.file.write_text("precious")
        with suppress(OSError):  # not every file system has attributes
            os.setxattr(self.file, "user.kept", b"yes")
        (folder / "secret.txt").write_text(self.secret)
        (folder / "stolen.py").write_text(f"SECRET = {self.secret!r}\n")
        os.environ["SECRET_TOKEN"] = self.secret
        stack.callback(os.environ.pop, "SECRET_TOKEN", None)
        self.sockets = {name: stack.enter_context(made) for name, made in self._sockets().items()}
        self.memory = LIBC.shmget(0, SIZE, NEW)
        self.place = LIBC.shmat(self.memory, None, 0)
        self.lock, self.queue = LIBC.semget(0, 1, NEW), LIBC.msgget(0, NEW)
        stack.callback(LIBC.shmctl, self.memory, IPC_RMID, None)
        stack.callback(LIBC.semctl, self.lock, 0, IPC_RMID)
        stack.callback(LIBC.msgctl, self.queue, IPC_RMID, None)
        self.before = self.seen()

    @property
    def events(self) -> set[str]:
        """What is seen once, and not again at the next look."""
        return {"signals to the victim", *(f"the {name} socket" for name in self.sockets)}

    @property
    def names(self) -> dict[str, Any]:
        ports = {name.upper(): made.getsockname() for name, made in self.sockets.items()}
        return {"TRAINER": os.getpid(), "VICTIM": self.victim.pid, "FILE": str(self.file), "FOLDER": str(self.folder),
                "SHM": self.memory, "SEM": self.lock, "MSG": self.queue, "MARK": self.mark, **ports}

    def _sockets(self) -> dict[str, socket.socket]:
        """Sockets that wait for a message or a connection."""
        found = {"tcp": socket.create_server(("127.0.0.1", 0)), "udp": socket.socket(type=socket.SOCK_DGRAM)}
        found["udp"].bind(("127.0.0.1", 0))
        for name, kind, place in (("named", socket.SOCK_DGRAM, str(self.folder / "socket")),
                                  ("abstract", socket.SOCK_STREAM, f"\0{self.mark}")):
            found[name] = socket.socket(socket.AF_UNIX, kind)
            found[name].bind(place)
        found["abstract"].listen()
        for made in found.values():
            made.setblocking(False)
        return found

    def seen(self) -> dict[str, Any]:
        """All that an attack could change, by name."""
        state = self.file.stat() if self.file.exists() else None
        return {
            "signals to the trainer": list(self.signals), "the trainer": settings_of(os.getpid()),
            "the victim's end": self.victim.poll(), "signals to the victim": self._told(),
            "the victim": settings_of(self.victim.pid), "locks on the file": self._is_locked(),
            "the file": state and (self.file.read_text(), state.st_mode, state.st_uid, state.st_gid, state.st_nlink,
                                   state.st_size, state.st_mtime_ns, attributes(self.file)),
            "the folder": sorted(os.listdir(self.folder)), "times of the folder": self.folder.stat().st_mtime_ns,
            "new files": [str(place) for place in self._marks() if os.path.lexists(place)],
            **{f"the {name} socket": heard(made) for name, made in self.sockets.items()}, **self._shared(),
        }

    def damage(self) -> str:
        """What has changed since the last look, in a few words; empty if nothing has."""
        now = self.seen()
        changed = [f"{name}: {self.before[name]!r:.60} -> {now[name]!r:.60}" for name in now
                   if now[name] != self.before[name]]
        self.before = now | {name: was for name, was in self.before.items() if name in self.events}
        return "; ".join(changed)

    def _told(self) -> bytes:
        assert self.victim.stdout is not None
        return self.victim.stdout.read(1 << 16) or b""

    def _is_locked(self) -> bool:
        with suppress(FileNotFoundError), self.file.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _marks(self) -> Iterator[Path]:
        package = Path(__file__).resolve().parents[2]
        for place in ("/", "/tmp", "/dev/shm", "/var/tmp", "/etc", Path.home(), package / "lowmem_grpo", sys.prefix):
            yield Path(place) / self.mark

    def _shared(self) -> dict[str, Any]:
        """System V's shared memory, semaphore and messages: alive, and with the values of before."""
        state = ctypes.create_string_buffer(512)
        stale = LIBC.shmctl(self.memory, IPC_STAT, state)  # the mode in it says whether it is to be removed
        return {"the shared memory": stale or (state.raw[:32], ctypes.string_at(self.place, 8)),
                "the semaphore": LIBC.semctl(self.lock, 0, GETVAL),
                "the messages": LIBC.msgctl(self.queue, IPC_STAT, state) or state.raw[:128]}


@contextmanager
def outside() -> Iterator[Outside]:
    """Everything, until the end of the block. Signals that come in between are noted, and do nothing else."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attacked-")))
        capset = OURS["capset"][MACHINES[os.uname().machine][0]]
        victim = subprocess.Popen([sys.executable, "-c", VICTIM.format(capset)], stdout=subprocess.PIPE, bufsize=0,
                                  start_new_session=True)
        stack.callback(end, victim)
        assert victim.stdout is not None and victim.stdout.readline() == b"ready\n"
        os.set_blocking(victim.stdout.fileno(), False)
        world = Outside(folder, victim, stack)
        for number in CATCHABLE:
            with suppress(OSError, ValueError):
                stack.callback(signal.signal, number, signal.signal(number, lambda n, _: world.signals.append(n)))
        yield world


def end(victim: subprocess.Popen[bytes]) -> None:
    victim.kill()
    victim.communicate()


def settings_of(process: int) -> Any:
    """Priority, processors, scheduling and limits of a process; None if it has ended."""
    try:
        limits = [resource.prlimit(process, kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)]
        adjusted = Path(f"/proc/{process}/oom_score_adj").read_text()
        return (os.getpriority(os.PRIO_PROCESS, process), os.sched_getaffinity(process),
                os.sched_getscheduler(process), limits, adjusted)
    except OSError:
        return None


def attributes(file: Path) -> list[tuple[str, bytes]]:
    with suppress(OSError):
        return [(name, os.getxattr(file, name)) for name in os.listxattr(file)]
    return []


def heard(made: socket.socket) -> bytes:
    """What came to a socket."""
    with suppress(BlockingIOError):
        if made.type == socket.SOCK_DGRAM:
            return made.recv(100)
        made.accept()[0].close()
        return b"a connection"
    return b""
