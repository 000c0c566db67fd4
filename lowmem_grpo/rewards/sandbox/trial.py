"""The run of a completion's code against a row's tests in the sandbox, and the choice of an isolation that works."""

import json
import logging
import mmap
import platform
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from lowmem_grpo.rewards.sandbox.cases import NO_RESULT, AssertCase, CallCase, Case, ProgramCase
from lowmem_grpo.rewards.sandbox.limits import Limits
from lowmem_grpo.rewards.sandbox.plain import decode, same
from lowmem_grpo.rewards.sandbox.worker import START_SECONDS, CannotStart, Worker, WorkerEnded, has_bubblewrap

ISOLATIONS = ("bubblewrap", "process")
BY_DEFAULT = "bubblewrap"
PROCESS_WARNING = (
    'isolation="process" limits model-written code, but if the kernel lacks Landlock 3 (Linux 6.2) the code can read, '
    "write or empty your files and look into your other processes; on every kernel it sees which files exist, how "
    "large and how old they are, and files that it removes while they are open do not count towards scratch_bytes; do "
    "not use it on a machine with secrets"
)
INSTALL = "apt install bubblewrap (it has this name elsewhere too: dnf install, pacman -S, zypper install, apk add)"
NAMESPACES = ("in a container allow user namespaces (docker run --security-opt seccomp=unconfined --security-opt "
              "systempaths=unconfined)")
FIX = (
    f"install bubblewrap 0.7 or newer: {INSTALL}; {NAMESPACES}; or accept less "
    'protection with isolation="process": limits on time, memory, processes and network hold there too, but if the '
    "kernel lacks Landlock 3 (Linux 6.2) the code can read and write your files"
)
WORKS = "works"
PROBE = "def probe(number):\n    return number + 1\n"
logger = logging.getLogger(__name__)


class SandboxError(RuntimeError):
    """The requested isolation does not work here; the message says why and what to do."""


@dataclass(frozen=True)
class Sandbox:
    """An isolation that works on this machine, and the limits of the code that runs in it."""

    isolation: str
    limits: Limits = field(default_factory=Limits)

    def start(self, role: str, code: str, **more: object) -> Worker:
        """Start a sandboxed process that runs `code` in a role of inside.py, with `more` entries of its order.
        worker.CannotStart on failure."""
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


def what_is_missing() -> tuple[str, str] | None:
    """Return for `doctor` why the default isolation does not work on this Linux machine, and the fix; None if it works
    or cannot work."""
    if sys.platform != "linux" or (why := why_not(BY_DEFAULT)) is None:
        return None
    return (f"code that a model writes cannot run in {BY_DEFAULT} ({' '.join(why.split())[:200]})",
            f"update it to 0.7 or newer; {NAMESPACES}" if has_bubblewrap() else INSTALL)


OUTCOMES = ("passed", "failed", "error", "timeout", "memory", "output", "files", "refused")
SHOWN = 200  # characters of a value in a reason
CALLS = 100_000  # requests between one test and the code
PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Verdict:
    """The result of one test: one of OUTCOMES, and the reason ("" for "passed").

    failed: a wrong answer. error: the code raised, ended itself or sent an invalid answer, or the test never called it.
    timeout, memory, output, files: the code exceeded a limit. refused: the code was not run.
    """

    outcome: str
    reason: str = ""
    untestable: bool = field(default=False, compare=False)  # no code can pass it, or only the code could decide it

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


def run_tests(code: str, cases: list[Case], sandbox: Sandbox) -> list[Verdict]:
    """Return one verdict for each case, in order. Raises only worker.CannotStart, whatever the code does."""
    if fault := why_refused(code, sandbox.limits.code_bytes):
        return [Verdict("refused", fault)] * len(cases)
    trial = Trial(code, sandbox, any(isinstance(case, CallCase) and case.json for case in cases))
    try:
        return [trial.verdict(case) for case in cases]
    finally:
        trial.close()


def why_refused(code: str, most: int) -> str | None:
    """Return the reason to refuse code (empty, too long, invalid Unicode, a NUL character); None if it can be run."""
    if not code.strip():
        return "no code"
    try:
        size = len(code.encode())
    except UnicodeEncodeError:
        return "the code is not valid Unicode"
    if size > most:
        return f"the code has {size} bytes, allowed are {most}"
    return "the code has a NUL character" if "\0" in code else None


def too_large(code: str, stdin: str, most: int) -> str | None:
    """Return a message if code and its input, in whole pages, exceed the scratch directory's size; None if not."""
    size = sum(-(-len(text.encode()) // PAGE) * PAGE for text in (code, stdin))
    return f"the code and its input take {size} bytes, the scratch directory {most}" if size > most else None


class Trial:
    """The test of a completion's code, in processes that are kept between tests and restarted if a test ended them."""

    def __init__(self, code: str, sandbox: Sandbox, imports: bool = False) -> None:
        """With `imports`, the code can use the names that LeetCode provides without an import."""
        self.imports = imports
        self.code, self.sandbox, self.limits = code, sandbox, sandbox.limits
        self.ends = time.monotonic() + sandbox.limits.total_seconds
        self.workers: dict[str, Worker] = {}  # by role
        self.broken: WorkerEnded | None = None  # the error of loading the code, if it failed
        self.begun: set[str] = set()  # roles for which a process was started before

    def verdict(self, case: Case) -> Verdict:
        if time.monotonic() >= self.ends:
            return Verdict("timeout", f"not begun within {self.limits.total_seconds:g} s of all tests")
        try:
            if isinstance(case, ProgramCase):
                return self.run_program(case)
            return self.run_call(case) if isinstance(case, CallCase) else self.run_assert(case)
        except WorkerEnded as end:
            self.close()
            return Verdict("error" if end.outcome == "ended" else end.outcome, end.reason)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()

    def started(self, role: str, code: str, **more: object) -> Worker:
        """Return a new process. Its start does not count as the code's time, unless it replaces an ended process."""
        began = time.monotonic()
        worker = self.sandbox.start(role, code, **more)
        if role == "program" or role not in self.begun:
            self.ends += time.monotonic() - began
        self.begun.add(role)
        return worker

    def deadline(self) -> float:
        return min(time.monotonic() + self.limits.seconds, self.ends)

    def serving(self) -> Worker:
        """Return the process that serves the code, started if needed. WorkerEnded if the code could not be loaded."""
        if self.broken is not None:
            raise self.broken
        if "serve" not in self.workers:
            server = self.workers["serve"] = self.started("serve", self.code, imports=self.imports)
            try:
                reply = server.receive(self.deadline())
                if "loaded" not in reply:
                    raise WorkerEnded(*failure_of(reply))
            except WorkerEnded as end:
                self.broken = end
                raise
        return self.workers["serve"]

    def run_call(self, case: CallCase) -> Verdict:
        reply = self.ask({"call": case.name, "args": case.args, "kwargs": case.kwargs}, None)
        if "value" not in reply:
            return Verdict(*failure_of(reply))
        right = [case.expected] if case.also is NO_RESULT else [case.expected, case.also]
        with suppress(TypeError, ValueError, AttributeError, RecursionError, ArithmeticError, LookupError):
            if any(same(value, reply["value"], case.json) for value in right):
                return Verdict("passed")  # the errors are those of an answer that is not encoded data
        return Verdict("failed", f"{case.name} gave {shown(reply['value'])}, expected {shown(case.expected)}")

    def ask(self, request: dict[str, Any], deadline: float | None) -> dict[str, Any]:
        """Send a request to the code; return {"value": ...} or {"error": ..., "text": ...}."""
        server = self.serving()
        deadline = self.deadline() if deadline is None else deadline
        server.send(request, deadline)
        return server.receive(deadline)

    def run_assert(self, case: AssertCase) -> Verdict:
        """Run the asserts in the test process, and relay messages between it and the code's process."""
        self.serving()
        if "test" not in self.workers:
            self.workers["test"] = self.started("test", "")
        tester, deadline, reply = self.workers["test"], self.deadline(), dict[str, Any]()
        tester.send({"source": case.source, "names": case.names, "modules": case.modules}, deadline)
        for _ in range(CALLS):
            message = tester.receive(deadline)
            if "outcome" in message:
                if "do" in reply:  # the code still waits for an answer of the test
                    self.close()
                outcome, reason = str(message["outcome"]), str(message["reason"])
                outcome = "memory" if (outcome, reply.get("error")) == ("error", "MemoryError") else outcome
                return Verdict(outcome, reason, bool(message["untestable"]))
            reply = self.ask(message, deadline)
            tester.send(reply, deadline)
        raise WorkerEnded("error", f"the test made more than {CALLS} calls")

    def run_program(self, case: ProgramCase) -> Verdict:
        if fault := too_large(self.code, case.stdin, self.limits.scratch_bytes):
            return Verdict("refused", fault)
        with self.started("program", self.code, stdin=case.stdin) as worker:
            status = worker.run_to_end(self.deadline())
            printed = bytes(worker.stdout).decode("utf-8", "replace")
            if status != 0:
                end = worker.ended()
                return Verdict("error" if end.outcome == "ended" else end.outcome, end.reason)
        if lines_of(printed) == lines_of(case.stdout):
            return Verdict("passed")
        return Verdict("failed", f"printed {printed[:SHOWN]!r}, expected {case.stdout[:SHOWN]!r}")


def failure_of(reply: dict[str, Any]) -> tuple[str, str]:
    kind, text = reply.get("error"), reply.get("text")
    if not isinstance(kind, str) or not isinstance(text, str):
        return "error", "its answer is not a message"
    return ("memory" if kind == "MemoryError" else "error"), text[:500]


def shown(tree: Any) -> str:
    """Return an encoded value as readable text: as Python shows it, or if it is large, as JSON, cut at SHOWN."""
    try:
        text = json.dumps(tree)
    except RecursionError:
        return "a very deep value"
    if len(text) > SHOWN:
        return text[:SHOWN] + "..."
    try:
        return text if '"iterator"' in text else repr(decode(tree))
    except (TypeError, ValueError, RecursionError, OverflowError):
        return text


def lines_of(text: str) -> list[str]:
    """Return the lines, without white space at their ends and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
