"""The parent's side of one sandboxed process: start, messages, limits, and cleanup. The scratch directory is a folder,
or in bubblewrap a tmpfs that ends with the process."""

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from dataclasses import asdict
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
    files. The paths, as the process sees them, are the scratch directory, the package, and what Landlock lets it read
    (None in bubblewrap). `descriptor` is the socket's; `folder` is the scratch directory without bubblewrap."""
    bare = isolation == "process"
    root = str(HERE.parent) if bare else ROOT
    words = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-X", "utf8", "-c", INSIDE.format(root=root),
             str(descriptor)]
    if bare:
        return words, {"scratch": folder, "package": root, "readable": [*python_folders(), str(HERE), *DEVICES]}
    program = shutil.which(BWRAP) or BWRAP
    return [program, *bubblewrap(limits), "--", *words], {"scratch": SCRATCH, "package": ROOT, "readable": None}


def has_bubblewrap() -> bool:
    return shutil.which(BWRAP) is not None


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
    """Remove a folder with all its content. A second try removes write-protected and very deep directories."""
    shutil.rmtree(folder, ignore_errors=True)
    if Path(folder).exists():
        for words in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*words, folder], stderr=subprocess.DEVNULL, check=False)


START_SECONDS = 30.0  # for Python to start and give up its rights; no model-written code runs before that
POLL_SECONDS = 0.05  # between checks of the scratch directory
HANG_UP_SECONDS = 0.5  # between the end of a process's channel and its exit
REAP_SECONDS = 5.0  # for a launcher to reap its child
XCPU, KILL = getattr(signal, "SIGXCPU", 24), getattr(signal, "SIGKILL", 9)  # Windows lacks them, and can import this
CPU_TIME = (-XCPU, 128 + XCPU)  # the statuses of Popen and of bwrap
KILLED = (-KILL, 128 + KILL)  # the first process of a namespace does not get SIGXCPU
TAIL = 4096  # bytes of standard error that are kept
NO_MESSAGE = "its answer is not a message"


class WorkerEnded(Exception):  # noqa: N818, it need not be an error
    """The process has ended or must be killed. `outcome` is one of trial.OUTCOMES, or "ended" if it ended by itself."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(f"{outcome}: {reason}")
        self.outcome, self.reason = outcome, reason


class CannotStart(RuntimeError):  # noqa: N818, the name says it
    """The sandbox itself does not work here; the message is its output."""


class Worker(contextlib.AbstractContextManager["Worker"]):
    """A sandboxed process that runs inside.py and follows one order. Close it, or use it in a `with` statement."""

    def __init__(self, isolation: str, limits: Limits, order: dict[str, Any]) -> None:
        """Start the process and wait until it has given up its rights. CannotStart if it does not get that far."""
        self.limits = limits
        self.stdout, self.stderr, self.printed = bytearray(), bytearray(), 0
        self._waiting, self._folder, self._place, self._began = bytearray(), "", -1, time.monotonic()
        self._held = contextlib.ExitStack()  # the process, descriptors and the scratch directory
        self.close = weakref.finalize(self, self._held.close)  # which also runs if the program exits before
        try:
            self._handshake(order | self._start(isolation) | {"limits": asdict(limits)})
        except BaseException:
            self.close()
            raise

    def _start(self, isolation: str) -> dict[str, Any]:
        if isolation == "process":  # in a namespace the scratch directory is a tmpfs, which ends with the process
            self._folder = tempfile.mkdtemp(prefix="lowmem-grpo-sandbox-")
            self._held.callback(remove, self._folder)
        self.channel, theirs = socket.socketpair()
        self._held.enter_context(self.channel)
        self._selector = self._held.enter_context(contextlib.closing(selectors.DefaultSelector()))
        with theirs:
            words, paths = command(isolation, self.limits, theirs.fileno(), self._folder)
            try:
                self._process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={},
                    cwd="/", pass_fds=[theirs.fileno()], start_new_session=True,
                )
            except OSError as error:
                raise CannotStart(str(error)) from error
        self._held.callback(end, self._process)
        for source in (self.channel, self._process.stdout, self._process.stderr):
            assert source is not None
            self._selector.register(source, selectors.EVENT_READ)
        return paths

    def _handshake(self, order: dict[str, Any]) -> None:
        """Send the order, and receive the scratch directory's descriptor with the first message."""
        deadline = time.monotonic() + START_SECONDS
        try:
            self.send(order, deadline)
            data, places, _, _ = socket.recv_fds(self.channel, 1 << 16, 1)
            for self._place in places:
                self._held.callback(os.close, self._place)
            self._waiting += data
            first = self.receive(deadline)
        except (WorkerEnded, OSError) as error:
            raise CannotStart(self._last_words() or "it ended before it was ready, without a message") from error
        if "ready" not in first:
            raise CannotStart(str(first.get("refused", first)))

    def send(self, message: dict[str, Any], deadline: float) -> None:
        """Send one message. WorkerEnded if the process does not take it before the deadline, by time.monotonic."""
        self.channel.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            self.channel.sendall(json.dumps(message).encode() + b"\n")
        except RecursionError as error:
            raise WorkerEnded("error", "its answer is nested too deeply") from error
        except TimeoutError as error:
            raise WorkerEnded("timeout", "it takes no input") from error
        except OSError as error:
            raise self.ended() from error

    def receive(self, deadline: float) -> dict[str, Any]:
        """Return the next message. WorkerEnded if it is late or malformed, or if a limit is exceeded."""
        while (end := self._waiting.find(b"\n")) < 0:
            if len(self._waiting) > self.limits.output_bytes:
                raise WorkerEnded("output", f"an answer of more than {self.limits.output_bytes} bytes")
            if not self._look(deadline):
                raise self.ended()
        line = bytes(self._waiting[:end])
        del self._waiting[: end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WorkerEnded("error", NO_MESSAGE) from error
        if not isinstance(message, dict):
            raise WorkerEnded("error", NO_MESSAGE)
        return message

    def run_to_end(self, deadline: float) -> int:
        """Wait for the process to end; return its exit status, negative for a signal. WorkerEnded as in `receive`."""
        while self._selector.get_map():
            self._look(deadline)
        return self._status()

    def _look(self, deadline: float) -> bool:
        """Wait up to POLL_SECONDS, read data, and enforce limits; return whether the channel was still open."""
        left, is_open = deadline - time.monotonic(), True
        if left <= 0:
            raise WorkerEnded("timeout", f"not done within {self.limits.seconds:g} s")
        for key, _ in self._selector.select(min(left, POLL_SECONDS)):
            data = b""
            with contextlib.suppress(ConnectionError):
                data = os.read(key.fd, 1 << 16)
            if not data:
                self._selector.unregister(key.fileobj)
                is_open &= key.fileobj is not self.channel
            elif key.fileobj is self.channel:
                self._waiting += data
            else:
                self._take_output(self.stdout if key.fileobj is self._process.stdout else self.stderr, data)
        if is_open:
            self._check_scratch()
        return is_open

    def _take_output(self, kept: bytearray, data: bytes) -> None:
        self.printed += len(data)
        if self.printed > self.limits.output_bytes:
            raise WorkerEnded("output", f"printed more than {self.limits.output_bytes} bytes")
        kept += data
        del self.stderr[:-TAIL]

    def _check_scratch(self) -> None:
        if self._place < 0:
            return
        most = self.limits.files
        entries, size = usage_of_folder(self._folder, most) if self._folder else usage_of_tmpfs(self._place)
        if entries > most or size > self.limits.scratch_bytes:
            raise WorkerEnded("files", f"{entries} files of {size} bytes in the scratch directory")

    def ended(self) -> WorkerEnded:
        """Return the WorkerEnded for a process that has ended, with its last line on standard error or its status."""
        status = self._status()
        words = self._last_words()
        if words.startswith("MemoryError"):
            return WorkerEnded("memory", words)
        if status in CPU_TIME or (status in KILLED and time.monotonic() - self._began >= self.limits.total_seconds):
            return WorkerEnded("timeout", f"used more than {self.limits.total_seconds:g} s of CPU time")
        return WorkerEnded("ended", words or f"it ended by itself, with exit status {status}")

    def _status(self) -> int:
        """Return the exit status. A process that is alive HANG_UP_SECONDS after it closed its channel is killed."""
        try:
            return self._process.wait(HANG_UP_SECONDS)
        except subprocess.TimeoutExpired:
            kill(self._process)
            return self._process.wait()

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        with contextlib.suppress(OSError):
            self.stderr += os.read(self._process.stderr.fileno(), TAIL)
        lines = bytes(self.stderr).decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:500] if lines else ""

    def __exit__(self, *_: object) -> None:
        self.close()


def end(process: subprocess.Popen[bytes]) -> None:
    kill(process)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process's children, wait until the process has reaped them, then kill its process group. If bwrap died
    before its child, the child would stay a zombie in a container whose first process reaps nothing."""
    if process.poll() is None and (children := children_of(process.pid)):
        for child in children:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAP_SECONDS)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def children_of(number: int) -> list[int]:
    """Return the PIDs of a process's children; an empty list if the kernel does not list them."""
    try:
        return [int(child) for child in Path(f"/proc/{number}/task/{number}/children").read_text().split()]
    except OSError:
        return []
