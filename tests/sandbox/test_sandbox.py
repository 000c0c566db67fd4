"""The sandbox: what model-written code cannot do, in every isolation that works here, and what it cannot pretend."""

import json
import logging
import mmap
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo.sandbox import command, file_access, isolation, system_calls
from lowmem_grpo.sandbox.cases import read_cases
from lowmem_grpo.sandbox.isolation import ISOLATIONS, Sandbox, SandboxError, open_sandbox, why_not
from lowmem_grpo.sandbox.limits import MIB, Limits
from lowmem_grpo.sandbox.plain import decode, encode, same
from lowmem_grpo.sandbox.system_calls import ALLOW, ERRNO, KILL, MACHINES, REFUSED, filter_program
from lowmem_grpo.sandbox.trial import OUTCOMES, Trial, Verdict, run_tests

LIMITS = Limits(seconds=2, total_seconds=30, memory_bytes=128 * MIB, scratch_bytes=MIB, files=40, output_bytes=50_000)
RIGHT = "def add(a, b):\n    return a + b\n"
ASSERT, CALL = "assert add(2, 3) == 5", {"call": "add", "args": [2, 3], "expected": 5}


@pytest.fixture(params=ISOLATIONS)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """Each isolation that works on this machine."""
    if fault := why_not(request.param):
        pytest.skip(f"{request.param}: {fault}")
    return Sandbox(request.param, LIMITS)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After every test: no process of ours that was not there before, and no scratch directory."""
    yield
    deadline = time.monotonic() + 3
    while (left := descendants()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def descendants() -> list[str]:
    """Command lines of processes that run our sandbox for this test process: its own children, and orphans."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            words = (entry / "cmdline").read_bytes()
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if b"lowmem_grpo.sandbox.inside" in words and parent in ("0", "1", str(os.getpid())):
            found.append(f"{entry.name} {words[:80]!r}")
    return found


def answer(sandbox: Sandbox, code: str, *args: Any) -> Any:
    """What the code's function `attempt` returns inside the sandbox."""
    trial = Trial(code, sandbox)
    try:
        reply = trial.ask({"call": "attempt", "args": encode(args), "kwargs": encode({})}, None)
    finally:
        trial.close()
    return decode(reply["value"])


def attempts(sandbox: Sandbox, imports: str, bodies: list[str], *args: Any) -> dict[str, Any]:
    """What each body came to, one after the other in one process: what it returned, or the name of what it raised."""
    parts = [wrapped(body).replace("attempt", f"attempt_{number}") for number, body in enumerate(bodies)]
    calls = ", ".join(f"attempt_{number}(*args)" for number in range(len(bodies)))
    code = f"import {imports}\n{''.join(parts)}def attempt(*args):\n    return [{calls}]\n"
    return dict(zip(bodies, answer(sandbox, code, *args), strict=True))


def outcome(sandbox: Sandbox, code: str, *tests: Any) -> list[str]:
    return [verdict.outcome for verdict in run_tests(code, read_cases(list(tests)), sandbox)]


def wrapped(body: str) -> str:
    """`body` as a function that returns what it returns, or the name of what it raises."""
    lines = "\n".join("        " + line for line in body.strip().splitlines())
    return f"def attempt(*args):\n    try:\n{lines}\n    except BaseException as error:\n" \
           "        return type(error).__name__\n"


# what is right passes, what is wrong does not


@pytest.mark.parametrize(("code", "expected"), [
    (RIGHT, ["passed"] * 4), ("def add(a, b):\n    return a - b\n", ["failed"] * 4),
    ("def add(a, b):\n    return str(a + b)\n", ["failed", "failed", "failed", "error"]),
    ("def add(a):\n    return a\n", ["error"] * 4), ("def plus(a, b):\n    return a + b\n", ["error"] * 4),
    ("def add(a, b) return a + b", ["error"] * 4), ("1 / 0", ["error"] * 4),
])
def test_each_test_gets_its_own_verdict(sandbox: Sandbox, code: str, expected: list[str]) -> None:
    loose = "def check(f):\n    assert f(1, 1) == 2\n    assert sorted([f(2, 2), 1]) == [1, 4]\ncheck(add)"
    assert outcome(sandbox, code, ASSERT, CALL, {"call": "add", "kwargs": {"a": 0, "b": 0}, "expected": 0},
                   loose)[:2] == expected[:2]
    mixed = outcome(sandbox, code, ASSERT, CALL, {"call": "add", "args": [0.5, 0.25], "expected": 0.75}, loose)
    assert mixed == (expected if code != "def add(a, b):\n    return str(a + b)\n" else ["failed"] * 4)


def test_the_reason_names_the_line_or_the_values(sandbox: Sandbox) -> None:
    wrong = run_tests("def add(a, b):\n    return a * b\n", read_cases([
        ASSERT, "assert add(1, 1) == 2, 'one and one'", CALL, "x = add(2, 2)\nassert x == 4\nassert x == 5",
    ]), sandbox)
    assert [verdict.reason for verdict in wrong] == [
        ASSERT, "assert add(1, 1) == 2, 'one and one': one and one", "add gave 6, expected 5", "assert x == 5",
    ]
    (error,) = run_tests("def add(a, b):\n    return a // 0\n", read_cases([ASSERT]), sandbox)
    assert error == Verdict("error", "ZeroDivisionError: integer division or modulo by zero")


@pytest.mark.parametrize(("code", "verdict"), [
    ("a, b = map(int, input().split())\nprint(a + b)", "passed"),
    ("print(sum(map(int, open(0).read().split())))", "passed"),
    ("import sys\nprint(5, end=' \\n\\n')\nsys.exit(0)", "passed"), ("print(6)", "failed"),
    ("print(5); print(5)", "failed"),
    ("print(5)\nraise SystemExit(3)", "error"), ("print(5)\n1 / 0", "error"), ("", "refused"),
    ("while True: pass", "timeout"), ("x = bytearray(10**9)", "memory"), ("while True: print('5' * 99)", "output"),
    ("import os\nprint(5, flush=True)\nos.kill(os.getppid(), 9)", "error"), ("import os\nos._exit(0)", "failed"),
])
def test_a_program_is_judged_by_what_it_prints(sandbox: Sandbox, code: str, verdict: str) -> None:
    assert outcome(sandbox, code, {"input": "2 3\n", "output": "5\n"}) == [verdict]


def test_methods_exceptions_and_every_plain_type_cross_the_border(sandbox: Sandbox) -> None:
    code = (
        "class Solution:\n    def double(self, x):\n        return 2 * x\n"
        "def echo(x):\n    return x\n"
        "def count(n):\n    yield from range(n)\n"
        "def fail():\n    raise ValueError('no')\n"
    )
    raises = "try:\n    fail()\nexcept ValueError as error:\n    assert 'no' in str(error)\nelse:\n    assert False"
    values = "for x in (None, True, 1, 10**400, -0.0, 1e999, 'é\\ud800', b'\\x00', 1j, (1, (2,)), {3},\n" \
             "          frozenset({4}), {(1, 2): [{}, ()]}, [], ''):\n" \
             "    assert echo(x) == x and type(echo(x)) is type(x)"
    verdicts = run_tests(code, read_cases([
        {"call": "Solution.double", "args": [4], "expected": 8}, raises, values, "assert list(count(3)) == [0, 1, 2]",
        {"call": "count", "args": [2], "expected": [0, 1]}, "import math\nassert math.isnan(echo(math.nan))",
    ]), sandbox)
    assert verdicts == [Verdict("passed")] * 6


def test_a_test_that_ends_the_process_leaves_the_next_tests_their_chance(sandbox: Sandbox) -> None:
    code = (
        "import os\n"
        "def add(a, b):\n"
        "    if a == 0:\n        os._exit(0)\n"
        "    if a == 1:\n        return [0] * 10**9\n"
        "    while a == 4:\n        pass\n"
        "    return a + b\n"
    )
    assert outcome(sandbox, code, "assert add(0, 0) == 0", ASSERT, "assert add(1, 0) == 1", "assert add(4, 0) == 4",
                   CALL) == ["error", "passed", "memory", "timeout", "passed"]


def test_tests_that_come_too_late_are_not_begun(sandbox: Sandbox) -> None:
    quick = Sandbox(sandbox.isolation, Limits(seconds=0.3, total_seconds=0.5, memory_bytes=128 * MIB))
    verdicts = run_tests("def add(a, b):\n    while True: pass", read_cases([ASSERT] * 20), quick)
    assert {verdict.outcome for verdict in verdicts} == {"timeout"}
    assert verdicts[-1].reason == "not begun within 0.5 s of all tests"


class SlowToStart(Sandbox):
    """A sandbox on a machine so busy that a start takes longer than all tests may."""

    def start(self, role: str, code: str, **more: Any) -> Any:
        time.sleep(self.limits.total_seconds)
        return super().start(role, code, **more)


def test_the_time_of_a_start_is_not_the_codes(sandbox: Sandbox) -> None:
    slow = SlowToStart(sandbox.isolation, Limits(seconds=3, total_seconds=3, memory_bytes=128 * MIB))
    assert outcome(slow, RIGHT, ASSERT, CALL) == ["passed", "passed"]
    assert outcome(slow, "print(5)", {"input": "", "output": "5"}, {"input": "1", "output": "5"}) == ["passed"] * 2


def test_a_code_that_ends_its_process_pays_for_the_next_start(sandbox: Sandbox) -> None:
    slow = SlowToStart(sandbox.isolation, Limits(seconds=1, total_seconds=1, memory_bytes=128 * MIB))
    verdicts = run_tests("import os\ndef add(a, b):\n    os._exit(0)", read_cases([CALL] * 9), slow)
    assert "not begun within 1 s of all tests" in verdicts[-1].reason


@pytest.mark.parametrize(("code", "stdin"), [
    ("print(1)", "a" * 70_000), ("print(1)\n#" + "a" * 70_000, ""), ("print(1)\n#" + "a" * 40_000, "é" * 20_000),
])
def test_a_program_too_large_for_its_scratch_directory_is_refused(sandbox: Sandbox, code: str, stdin: str) -> None:
    small = Sandbox(sandbox.isolation, Limits(scratch_bytes=64 * 1024))
    (verdict,) = run_tests(code, read_cases([{"input": stdin, "output": "1"}]), small)
    assert verdict.outcome == "refused" and "the scratch directory 65536" in verdict.reason


def test_a_program_that_just_fits_runs(sandbox: Sandbox) -> None:
    small = Sandbox(sandbox.isolation, Limits(seconds=30, total_seconds=30, scratch_bytes=16 * mmap.PAGESIZE))
    stdin = "a" * 15 * mmap.PAGESIZE
    assert outcome(small, "print(len(input()))", {"input": stdin, "output": str(len(stdin))}) == ["passed"]


@pytest.mark.parametrize("code", ["while True: pass", "1 / 0", "def add(", "import os\nos._exit(0)"])
def test_code_that_does_not_load_is_loaded_once(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault := why_not("process"):
        pytest.skip(fault)
    started, start = [], Sandbox.start

    def counted(sandbox: Sandbox, role: str, *args: Any, **more: Any) -> Any:
        started.append(role)
        return start(sandbox, role, *args, **more)

    monkeypatch.setattr(Sandbox, "start", counted)
    verdicts = run_tests(code, read_cases([CALL, ASSERT, CALL]), Sandbox("process", LIMITS))
    assert started == ["serve"] and len(set(verdicts)) == 1 and not verdicts[0].passed


@pytest.mark.parametrize(("code", "reason"), [
    ("", "no code"), (" \n", "no code"), ("x = 1 #" + "x" * 100_000, "allowed are 100000"), ("x = '\0'", "NUL"),
    ("x = '\ud800'", "not valid Unicode"),
])
def test_what_cannot_be_code_is_not_run(code: str, reason: str) -> None:
    nowhere = Sandbox("no such isolation", LIMITS)  # it would raise if it were started
    (verdict,) = run_tests(code, read_cases([ASSERT]), nowhere)
    assert verdict.outcome == "refused" and reason in verdict.reason


# escapes: processes


BOUNDED_FORKS = """
made = 0
for _ in range(200):
    pid = START
    if pid == 0:
        os._exit(0)
    made += pid > 0
return made
"""
CLONE = "libc.syscall(ctypes.c_long({}), 17, 0, 0, 0, 0)"


STARTS = [
    "os.fork()", "os.forkpty()[0]", "os.posix_spawn('/bin/true', ['true'], {})", "subprocess.Popen(['/bin/true']).pid",
    "multiprocessing.get_context('fork').Process(target=int).start() or 1", "int(os.system('true') == 0) or -1",
]


def test_no_second_process_can_be_started(sandbox: Sandbox) -> None:
    bodies = [BOUNDED_FORKS.replace("START", way) for way in STARTS]
    found = attempts(sandbox, "os, subprocess, multiprocessing", bodies)
    assert set(found.values()) <= {"PermissionError", "FileNotFoundError", 0}, found  # no pty, no program: nor a child


@pytest.mark.parametrize("name", ["clone", "clone3", "fork", "vfork"])
def test_the_kernel_itself_refuses_a_process(sandbox: Sandbox, name: str) -> None:
    number = REFUSED[name][MACHINES[os.uname().machine][0]]
    if number is None:
        pytest.skip(f"{os.uname().machine} has no {name}")
    code = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n" + wrapped(
        f"result = {CLONE.format(number)}\nif result == 0:\n    os._exit(0)\nreturn result, ctypes.get_errno()"
    )
    assert answer(sandbox, code) == (-1, 1)


def test_no_thread_can_be_started_and_no_other_program_takes_over(sandbox: Sandbox) -> None:
    thread = "import threading\n" + wrapped("threading.Thread(target=int).start()")
    assert answer(sandbox, thread) == "RuntimeError"
    assert answer(sandbox, "import os\n" + wrapped("os.execv('/bin/sh', ['sh', '-c', 'true'])")) == "PermissionError"


def test_a_fork_bomb_makes_nothing(sandbox: Sandbox) -> None:
    """Its children would leave at once: a bomb that does no harm where the sandbox has a hole."""
    bomb = "import os\nmade = 0\ndef attempt():\n    global made\n    for _ in range(100_000):\n        try:\n" \
           "            if os.fork() == 0:\n                os._exit(0)\n            made += 1\n" \
           "            if made > 200:\n                break\n" \
           "        except OSError:\n            pass\n    return made\n"
    assert answer(sandbox, bomb) == 0


def test_a_daemon_that_would_outlive_its_parent_is_not_born(sandbox: Sandbox) -> None:
    code = (
        "import os, time\n"
        "def attempt(a, b):\n"
        "    try:\n        os.setsid()\n    except OSError:\n        pass\n"
        "    try:\n        pid = os.fork()\n    except OSError:\n        return 'alone'\n"
        "    if pid == 0:\n        time.sleep(2)\n        os._exit(0)\n"
        "    return 'parent'\n"
    )
    assert answer(sandbox, code, 0, 0) == "alone"


@pytest.mark.parametrize("order", ["1, 0, 0, 0, 0", "4, 1, 0, 0, 0"])  # PR_SET_PDEATHSIG, PR_SET_DUMPABLE
def test_code_that_would_live_on_when_its_parent_is_killed_dies_all_the_same(sandbox: Sandbox, order: str) -> None:
    """`nothing_left_behind` looks for what outlives the kill."""
    code = f"import ctypes, time\nlibc = ctypes.CDLL(None, use_errno=True)\ndone = libc.prctl({order})\n" \
           "number = ctypes.get_errno()\ndef attempt(*args):\n    if args:\n        time.sleep(20)\n" \
           "    return done, number\n"
    assert answer(sandbox, code) == (-1, 1)
    assert outcome(sandbox, code, {"call": "attempt", "args": [1], "expected": 0}) == ["timeout"]


def test_a_loop_that_ignores_every_signal_is_killed_in_time(sandbox: Sandbox) -> None:
    code = (
        "import signal\n"
        "for number in range(1, 65):\n"
        "    try:\n        signal.signal(number, signal.SIG_IGN)\n    except (OSError, ValueError):\n        pass\n"
        "def add(a, b):\n    while True:\n        pass\n"
    )
    began = time.monotonic()
    assert outcome(sandbox, code, ASSERT) == ["timeout"]
    assert time.monotonic() - began < 60  # it would never end; two starts on a busy machine take their time


def test_cpu_time_is_limited_apart_from_the_clock(sandbox: Sandbox) -> None:
    patient = Sandbox(sandbox.isolation, Limits(seconds=30, total_seconds=1, memory_bytes=128 * MIB))
    with patient.start("program", "while True: pass", stdin="") as worker:
        worker.run_to_end(time.monotonic() + 20)
        assert worker.ended().outcome == "timeout" and "CPU time" in worker.ended().reason


ATTACKS = [
    "os.kill(os.getppid(), 9)", "os.kill(-1, 9)", "os.killpg(0, 9)", "signal.pidfd_send_signal(os.pidfd_open(1), 9)",
    "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "resource.prlimit(0, resource.RLIMIT_NPROC, (9, 9))",
    "os.open('/proc/%d/mem' % os.getppid(), os.O_RDWR)", "os.chmod('.', 0)", "os.chown('.', 1, 1)", "os.setuid(12345)",
    "open('own', 'w').close(); os.truncate('own', 0)",  # by descriptor it may
    "os.chroot('.')", "assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0",
    "assert ctypes.CDLL(None).syscall(425, 8, bytes(200)) >= 0",
]


def test_other_processes_and_its_own_limits_are_out_of_reach(sandbox: Sandbox) -> None:
    found = attempts(sandbox, "ctypes, os, signal, resource", [f"{attack}\nreturn 'done'" for attack in ATTACKS])
    refused = {"PermissionError", "FileNotFoundError", "AssertionError", "OSError", "ValueError"}
    assert len(found) == len(ATTACKS) and set(found.values()) <= refused, found


# escapes: memory, output, files


@pytest.mark.parametrize("body", [
    "return len(bytearray(10**9))", "grown = []\nwhile True:\n    grown.append('x' * 10**6 + str(len(grown)))",
    "import mmap\nreturn len(mmap.mmap(-1, 10**9))", "return len([0] * 10**9)",
])
def test_a_memory_bomb_stays_small(sandbox: Sandbox, body: str) -> None:
    code = "def add(a, b):\n" + "".join(f"    {line}\n" for line in body.splitlines())
    (verdict,) = run_tests(code, read_cases([CALL]), sandbox)
    assert verdict.outcome == "memory" or "Cannot allocate memory" in verdict.reason, verdict


def test_memory_that_no_limit_counts_cannot_be_had(sandbox: Sandbox) -> None:
    shared = "import ctypes\nlibc = ctypes.CDLL(None)\n" + wrapped("return libc.shmget(0, 10**8, 0o1600)")
    assert answer(sandbox, shared) == -1
    nameless = "import os\n" + wrapped("f = os.memfd_create('x')\nos.ftruncate(f, 10**9)")
    assert answer(sandbox, nameless) == "PermissionError"
    pieces = "import os\n" + wrapped("f = os.memfd_create('x')\nos.write(f, bytes(10))\nreturn 'written'")
    assert answer(sandbox, pieces) == "PermissionError"  # also where each is smaller than a file may be


@pytest.mark.parametrize("writes", ["print('x' * 1000)", "os.write(2, b'x' * 1000)"])
def test_endless_output_ends_the_process(sandbox: Sandbox, writes: str) -> None:
    assert outcome(sandbox, f"import os\ndef add(a, b):\n    while True:\n        {writes}\n", ASSERT) == ["output"]
    assert outcome(sandbox, f"import os\nwhile True:\n    {writes}\n", CALL) == ["output"]


@pytest.mark.parametrize(("code", "expected"), [
    ("return 'x' * 10**6", "output"), ("yield from iter(int, 1)", ("timeout", "memory")),
    ("x = []\n    for _ in range(10**5):\n        x = [x]\n    return x", "error"), ("return object()", "error"),
    ("x = []\n    x.append(x)\n    return x", "error"), ("raise SystemExit", "error"),
    ("raise KeyboardInterrupt", "error"),
    ("x = []\n    for _ in range(400):\n        x = [x]\n    return x", ("failed", "error")),  # Python's depth decides
])
def test_an_answer_that_is_too_much_is_no_answer(sandbox: Sandbox, code: str, expected: Any) -> None:
    for verdict in outcome(sandbox, f"def add(a, b):\n    {code}\n", CALL, ASSERT):
        assert verdict in expected


def test_a_file_is_limited_in_size(sandbox: Sandbox) -> None:
    write = "with open('big', 'wb') as f:\n    for _ in range(100):\n        f.write(bytes(10**5))\n"
    assert answer(sandbox, wrapped(write)) == "OSError"
    assert answer(sandbox, wrapped("with open('big', 'wb') as f:\n    f.truncate(10**10)")) == "OSError"


@pytest.mark.parametrize("body", [
    "open(f'{number}', 'w').close()", "os.makedirs('/'.join('d' * number))", "os.symlink('/nowhere', f'{number}')",
    "os.mkdir(f'{number}', 0)", "os.mkdir('d'); os.chdir('d')",
])
def test_files_are_limited_in_number(sandbox: Sandbox, body: str) -> None:
    code = "import os, time\ndef add(a, b):\n    for number in range(1, 400):\n" \
           f"        {body}\n        time.sleep(0.002)\n"
    (verdict,) = run_tests(code, read_cases([CALL]), sandbox)
    assert verdict.outcome == "files", verdict


def test_many_files_share_one_limit_of_bytes(sandbox: Sandbox) -> None:
    code = (
        "import time\ndef add(a, b):\n    for number in range(30):\n        with open(str(number), 'wb') as f:\n"
        "            f.write(bytes(10**5))\n        time.sleep(0.02)\n    return 'written'\n"
    )
    (verdict,) = run_tests(code, read_cases([CALL]), sandbox)
    assert verdict.outcome == "files" or "No space left" in verdict.reason, verdict


def needs_a_closed_file_system(sandbox: Sandbox) -> None:
    if sandbox.isolation == "process" and file_access.version() < file_access.COMPLETE:
        pytest.skip("process: this kernel lacks Landlock 3, and the opt-in says that files are open then")


NEW = f"escaped-{os.getpid()}"
WRITES = [
    "open(args[0], 'w').write('x')", "open(args[0], 'a').write('x')", "os.remove(args[0])", "os.truncate(args[0], 0)",
    "os.rename(args[0], args[0] + '2')", "os.symlink(args[0], 'link'); open('link', 'w').write('x')",
    "os.link(args[0], 'hard'); open('hard', 'w').write('x')", "open(args[0] + '.new', 'w').close()",
    "os.mkdir(args[0] + '.d')", "shutil.rmtree(os.path.dirname(args[0]))", f"open('/dev/shm/{NEW}', 'w').write('x')",
    f"open('/{NEW}', 'w').write('x')", f"os.mkdir('/tmp/{NEW}')", "open('/package/lowmem_grpo/x', 'w').write('x')",
]


def test_files_outside_cannot_be_changed(sandbox: Sandbox, tmp_path: Path) -> None:
    needs_a_closed_file_system(sandbox)
    victim = tmp_path / "victim.txt"
    victim.write_text("precious")
    found = attempts(sandbox, "os, shutil", [f"{way}\nreturn 'done'" for way in WRITES], str(victim))
    assert set(found.values()) <= {"PermissionError", "FileNotFoundError", "OSError"}, found
    assert victim.read_text() == "precious" and os.listdir(tmp_path) == ["victim.txt"]


READS = [
    "return open(args[0]).read()", "os.symlink(args[0], 'link'); return open('link').read()",
    "return open('/proc/%d/environ' % os.getppid()).read()", "return os.listdir(os.path.dirname(args[0]))",
    "return open('/proc/1/environ').read()", "return open('/etc/shadow').read()", "return open('/etc/passwd').read()",
    "return os.listdir('/home')", "return os.listdir(os.path.dirname(args[0]) + '/..')",
]


def test_secrets_outside_cannot_be_read(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_a_closed_file_system(sandbox)
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    found = attempts(sandbox, "os", READS, str(secret))
    assert set(found.values()) <= {"PermissionError", "FileNotFoundError"}, found


def test_the_environment_is_empty_and_no_descriptor_is_inherited(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    with (tmp_path / "open.txt").open("w") as ours:
        os.set_inheritable(ours.fileno(), True)
        environment = answer(sandbox, "import os\n" + wrapped("return sorted(set(os.environ) - {'LC_CTYPE', 'PWD'})"))
        open_ones = "import os\n" + wrapped(
            "found = []\nfor n in range(40):\n    try:\n        os.fstat(n)\n        found.append(n)\n"
            "    except OSError:\n        pass\nreturn found"
        )
        descriptors = answer(sandbox, open_ones)
    assert environment == []
    assert descriptors[:3] == [0, 1, 2] and len(descriptors) == 4  # the fourth carries answers
    assert answer(sandbox, wrapped("return input()")) == "EOFError"


def test_there_is_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        code = "import socket\n" + wrapped("socket.create_connection(('127.0.0.1', args[0]), 0.5).send(b'x')")
        assert answer(sandbox, code, port) == "PermissionError"
        with pytest.raises(TimeoutError):
            server.accept()
    kinds = [f"socket.socket(socket.{name})" for name in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK")]
    found = attempts(sandbox, "socket", [*kinds, "socket.socketpair(type=socket.SOCK_DGRAM)"])
    assert set(found.values()) == {"PermissionError"}, found


def test_asyncio_works_all_the_same(sandbox: Sandbox) -> None:
    code = "import asyncio\nasync def later(a, b):\n    await asyncio.sleep(0.01)\n    return a + b\n" \
           "def add(a, b):\n    return asyncio.run(later(a, b))\n"
    assert outcome(sandbox, code, ASSERT) == ["passed"]


def test_the_scratch_directory_serves_and_goes(sandbox: Sandbox, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "kept.txt").write_text("kept")
    code = (
        "import os\n"
        "def add(a, b):\n"
        f"    os.symlink({str(outside)!r}, 'link')\n"
        "    os.mkdir('locked', 0o700)\n    open('locked/x', 'w').write('5')\n    os.mkdir('none', 0)\n"
        "    return int(open('locked/x').read())\n"
    )
    assert outcome(sandbox, code, CALL) == ["passed"]
    assert os.listdir(tmp_path) == []
    assert (outside / "kept.txt").read_text() == "kept"


ENDS_EARLY = """
from lowmem_grpo.sandbox.isolation import Sandbox
from lowmem_grpo.sandbox.limits import Limits
worker = Sandbox({!r}, Limits()).start("serve", "while True: pass")
print("started", flush=True)
"""


def test_a_program_that_ends_in_between_leaves_nothing(sandbox: Sandbox, tmp_path: Path) -> None:
    """No process either: `nothing_left_behind` looks for orphans."""
    ended = subprocess.run([sys.executable, "-c", ENDS_EARLY.format(sandbox.isolation)], capture_output=True,
                           env={**os.environ, "TMPDIR": str(tmp_path)}, timeout=120, check=True)
    assert ended.stdout == b"started\n" and os.listdir(tmp_path) == []


# forged verdicts


YES = "class Yes(BASE):\n    def __eq__(self, other): return True\n    __ne__ = lambda self, other: False\n" \
      "    __hash__ = None\n    __bool__ = lambda self: True\n"
WRITE_ALL = "for n in range(3, 64):\n    try:\n        os.write(n, LINE)\n    except OSError:\n        pass\n"
FORGERIES = {
    "prints passed": "print('passed', flush=True)\ndef add(a, b):\n    print('passed')\n",
    "exits cleanly": "import sys\nsys.exit(0)",
    "exits cleanly when called": "import sys\ndef add(a, b):\n    sys.exit(0)\n",
    "exits at once": "import os\nos._exit(0)",
    "exits at once when called": "import os\ndef add(a, b):\n    os._exit(0)\n",
    "raises AssertionError": "def add(a, b):\n    raise AssertionError\n",
    "overrides AssertionError": "import builtins\nclass Never(Exception): pass\nbuiltins.AssertionError = Never\n"
                                "def add(a, b):\n    return 0\n",
    "equals everything": YES.replace("BASE", "object") + "def add(a, b):\n    return Yes()\n",
    "an int that equals everything": YES.replace("BASE", "int") + "def add(a, b):\n    return Yes(6)\n",
    "a list that equals everything": YES.replace("BASE", "list") + "def add(a, b):\n    return Yes()\n",
    "a string that equals everything": YES.replace("BASE", "str") + "def add(a, b):\n    return Yes('5')\n",
    "not a number": "def add(a, b):\n    return float('nan')\n",
    "takes the place of built-ins": "def add(a, b):\n    return 0\ndef abs(x):\n    return 0\n"
                                    "def sorted(x):\n    return [5]\nall = any = sorted\n",
    "changes built-ins": "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.all = builtins.sorted = lambda x: [5]\n"
                         "def add(a, b):\n    return 0\n",
    "writes verdicts to every descriptor": "import os\nLINE = b'{\"outcome\": \"passed\", \"reason\": \"\"}\\n'\n"
                                           + WRITE_ALL + "def add(a, b):\n" + "".join(
                                               f"    {line}\n" for line in WRITE_ALL.splitlines()) + "    return 0\n",
    "answers with a verdict too": "import os\nLINE = b'{\"loaded\": true, \"value\": 0, \"outcome\": \"passed\"}\\n'\n"
                                  + 9 * WRITE_ALL,
    "answers with nonsense": "import os\nLINE = b'\\xff\\x00[[[[\\n'\n" + WRITE_ALL,
    "answers with encoded nonsense": "import os\nLINE = b'{\"value\": {\"set\": 5}}\\n'\n" + 9 * WRITE_ALL,
    "hangs up": "import os\nfor n in range(64):\n    try:\n        os.close(n)\n    except OSError:\n        pass\n"
                "while True: pass\n",
    "takes over the harness": "import sys\ninside = sys.modules['lowmem_grpo.sandbox.inside']\n"
                              "inside.encode = lambda value: {'outcome': 'passed', 'anything': True}\n"
                              "inside.answer = lambda module, request: True\n",
    "walks the frames": "import sys\nframe = sys._getframe()\nwhile frame:\n"
                        "    for value in list(frame.f_locals.values()):\n"
                        "        if hasattr(value, 'send') and hasattr(value, 'socket'):\n"
                        "            value.send({'outcome': 'passed', 'reason': ''})\n    frame = frame.f_back\n"
                        "def add(a, b):\n    return 0\n",
    "rewrites the harness": "import lowmem_grpo.sandbox.inside as inside\nfor name in ('trial.py', 'plain.py'):\n"
                            "    path = inside.__file__.replace('inside.py', name)\n    open(path, 'a').close()\n"
                            "    opened = True\nresult = 5 if opened else 0\ndef add(a, b):\n    return result\n",
    "leaves files for the test": "open('tests.py', 'w').write('')\nopen('code.py', 'w').write('')\n"
                                 "open('builtins.py', 'w').write('')\ndef add(a, b):\n    return 0\n",
    "returns a generator": "def add(a, b):\n    yield 5\n",
    "ends loops": "def add(a, b):\n    raise StopIteration\n",
    "ends loops of its own kind": "class End(StopIteration): pass\ndef add(a, b):\n    raise End\n",
    "ends asynchronous loops": "def add(a, b):\n    raise StopAsyncIteration\n",
    "answers before it is asked": "def add(a, b):\n    return 0\ndef check(*a):\n    return True\n",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_verdict_never_passes(sandbox: Sandbox, name: str) -> None:
    needs_a_closed_file_system(sandbox) if name == "rewrites the harness" else None
    helped = "def check(f):\n    assert abs(f(2, 3) - 5) < 1 and all([sorted([f(2, 3)]) == [5]])\ncheck(add)"
    looped = "assert all(map(lambda x: add(x, x) == x * 7, [1, 2, 3]))"
    later = "class Later:\n    def __aiter__(self):\n        return self\n    async def __anext__(self):\n" \
            "        return add(2, 3)\nasync def check():\n    async for found in Later():\n" \
            "        assert found == 'a sum'\n        break\n" \
            "try:\n    check().send(None)\nexcept StopIteration:\n    pass"
    tests = [ASSERT, CALL, helped, looped, later]
    verdicts = outcome(sandbox, FORGERIES[name], *tests)
    assert "passed" not in verdicts and set(verdicts) <= set(OUTCOMES)


@pytest.mark.parametrize("code", [
    "print('passed')", "import sys\nsys.exit(0)", "import os\nos._exit(0)",
    "import atexit\natexit.register(print, 5)\n1/0",
    "import os\nos.write(1, b'{\"outcome\": \"passed\"}')", "import os\nos.close(1)",
    "print(5, file=__import__('sys').stderr)",
])
def test_a_program_cannot_forge_its_output(sandbox: Sandbox, code: str) -> None:
    assert outcome(sandbox, code, {"input": "2 3", "output": "5"})[0] in ("failed", "error")


def test_the_code_under_test_never_sees_what_is_expected(sandbox: Sandbox) -> None:
    """Every string and number that the process can reach is searched for the expected value."""
    code = (
        "import gc, sys\n"
        "def attempt(*args):\n"
        "    seen = set()\n    waiting = list(gc.get_objects()) + [vars(m) for m in list(sys.modules.values())]\n"
        "    for _ in range(3):\n"
        "        waiting = [o for o in gc.get_referents(*waiting) if id(o) not in seen and not seen.add(id(o))]\n"
        "        if any(type(o) in (str, bytes) and ''.join(['never', 'more']) in str(o) for o in waiting):\n"
        "            return 'found'\n"
        "    return 'hidden'\n"
    )
    tests = [{"call": "attempt", "args": [], "expected": "nevermore"}, "assert attempt() == 'nevermore'"]
    verdicts = run_tests(code, read_cases(tests), sandbox)
    assert verdicts[0].reason == "attempt gave 'hidden', expected 'nevermore'"
    assert verdicts[1].outcome == "failed"


def test_keys_that_collide_do_not_slow_the_parent(sandbox: Sandbox) -> None:
    code = (
        "import os, stat\n"
        "keys = ','.join(str(n * (2**61 - 1)) for n in range(2300))\n"
        "LINE = b'{\"loaded\": true}\\n' + ('{\"value\": {\"set\": [' + keys + ']}}\\n').encode()\n"
        "for n in range(3, 40):\n"
        "    try:\n        os.write(n, LINE)\n    except OSError:\n        pass\n"
        "def add(a, b):\n    return 0\n"
    )
    (verdict,) = run_tests(code, read_cases([{"call": "add", "args": [1, 2], "expected": "x"}]), sandbox)
    assert verdict.outcome == "failed"


def test_trees_are_compared_without_a_hash_of_their_keys() -> None:
    """10,000 keys that collide make 50 million comparisons in a set; as items of a list they make none."""
    tree = {"set": [number * (2**61 - 1) for number in range(10_000)]}
    began = time.process_time()
    assert not same("x", tree) and not same({"set": [1]}, tree)
    compared = time.process_time() - began
    began = time.process_time()
    decode(tree)
    assert compared < (time.process_time() - began) / 2


NEVER_CALLED = [
    "def check(candidate):\n    assert candidate(1, 1) == 2", "assert add", "assert callable(add)", "assert True",
    "import unittest\nclass Sums(unittest.TestCase):\n    def test_sum(self):\n        self.assertEqual(add(1, 1), 2)",
    "for a, b in []:\n    assert add(a, b) == 0",
]


def test_a_test_that_never_calls_the_code_passes_none(sandbox: Sandbox) -> None:
    verdicts = run_tests(RIGHT, read_cases([*NEVER_CALLED, NEVER_CALLED[0] + "\ncheck(add)"]), sandbox)
    assert verdicts == [Verdict("error", "the test never called the code")] * 6 + [Verdict("passed")]


# choice of an isolation


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without bubblewrap and nsjail."""
    monkeypatch.setattr(command, "PROGRAMS", {"bubblewrap": "no-such-bwrap", "nsjail": "no-such-nsjail"})
    why_not.cache_clear()
    isolation.warn_of_process.cache_clear()
    yield
    why_not.cache_clear()
    isolation.warn_of_process.cache_clear()


@pytest.mark.usefixtures("no_programs")
@pytest.mark.parametrize("asked", [None, "bubblewrap", "nsjail"])
def test_without_a_sandbox_the_error_names_every_way_out(asked: str | None) -> None:
    with pytest.raises(SandboxError, match=r"apt install bubblewrap") as caught:
        open_sandbox(asked)
    assert 'isolation="process"' in str(caught.value) and "no-such" in str(caught.value)


@pytest.mark.usefixtures("no_programs")
def test_the_plain_process_is_an_opt_in_that_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    if fault := why_not("process"):
        pytest.skip(fault)
    with caplog.at_level(logging.WARNING, "lowmem_grpo"):
        assert open_sandbox("process").isolation == "process"
        open_sandbox("process")
    assert [record.getMessage() for record in caplog.records] == [isolation.PROCESS_WARNING]
    assert "\n" not in isolation.PROCESS_WARNING and "files" in isolation.PROCESS_WARNING
    assert f"Landlock {file_access.COMPLETE} " in isolation.PROCESS_WARNING


def test_a_sandbox_that_is_installed_but_does_not_work_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(command, "PROGRAMS", {"bubblewrap": str(broken), "nsjail": "/bin/true"})
    why_not.cache_clear()
    try:
        with pytest.raises(SandboxError, match=r"No permissions to create new namespace.*nsjail: "):
            open_sandbox()
    finally:
        why_not.cache_clear()


def test_an_unknown_isolation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="isolation is 'docker'; allowed are bubblewrap, nsjail, process"):
        open_sandbox("docker")


@pytest.mark.parametrize(("name", "value"), [
    ("seconds", 0), ("seconds", float("inf")), ("memory_bytes", 1000), ("files", True), ("output_bytes", "many"),
    ("scratch_bytes", -1), ("total_seconds", float("nan")),
])
def test_a_limit_that_limits_nothing_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value!r}; it must be"):
        Limits(**{name: value})


def test_command_lines_shut_everything_that_they_should() -> None:
    words = command.command("bubblewrap", LIMITS, 7, "").words
    assert {"--unshare-all", "--die-with-parent", "--new-session", "--clearenv"} <= set(words)
    assert words[words.index("--size"):][:4] == ["--size", str(MIB), "--tmpfs", "/scratch"]
    assert words[words.index("--") - 2:][:2] == ["--remount-ro", "/"] and words[-1] == "7"
    bound = [words[at + 1] for at, word in enumerate(words) if word in ("--ro-bind", "--bind", "--dev-bind")]
    assert "--bind" not in words and not {"/", "/home", "/root", "/tmp", "/proc", "/etc"} & set(bound)
    assert not any(one.startswith(f"{other}/") for one in bound for other in bound if other != "/package")
    words = command.command("nsjail", LIMITS, 7, "").words
    assert {"--disable_proc", "--iface_no_lo"} <= set(words) and "--keep_env" not in words
    assert f"none:/scratch:tmpfs:size={MIB},mode=0700" in words
    assert words[words.index("--pass_fd") + 1] == "7"
    words = command.command("process", LIMITS, 7, "/tmp/x").words
    assert words[1:6] == ["-I", "-S", "-B", "-X", "utf8"]


# the filter of system calls, and plain data


def run_filter(machine: str, arch: int, number: int, argument: int = 0) -> int:
    """What the filter says of a call: the kernel's instructions, interpreted."""
    data = struct.pack("IIQQQ", number, arch, 0, 0, argument)
    program = list(struct.iter_unpack("HBBI", filter_program(machine)))
    at = accumulator = 0
    while True:
        code, true, false, value = program[at]
        at += 1
        if code == system_calls.LOAD:
            (accumulator,) = struct.unpack_from("I", data, value)
        elif code == system_calls.AND:
            accumulator &= value
        elif code == system_calls.RETURN:
            return value
        else:
            holds = accumulator == value if code == system_calls.JUMP_EQUAL else accumulator >= value
            at += true if holds else false


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_refuses_its_calls_and_no_other(machine: str) -> None:
    column, arch = MACHINES[machine]
    refused = {numbers[column] for numbers in REFUSED.values()} - {None}
    pair = system_calls.SOCKETPAIR[column]
    for number in set(range(500)) - {pair}:
        assert run_filter(machine, arch, number) == (ERRNO | 1 if number in refused else ALLOW), number
    data = struct.pack("IIQQQ", pair, arch, 0, 0, 0)
    assert len(data) == 32
    assert run_filter(machine, arch ^ 1, 0) == KILL
    assert run_filter(machine, arch, system_calls.X32 + 57) == KILL


@pytest.mark.parametrize(("machine", "header", "prefix"), [
    ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "__NR_"),
    ("aarch64", "/usr/include/asm-generic/unistd.h", "__NR(?:3264)?_"),
])
def test_the_numbers_are_the_kernels(machine: str, header: str, prefix: str) -> None:
    if not Path(header).is_file():
        pytest.skip(f"no {header}")
    lines = re.findall(rf"#define {prefix}(\w+)\s+(\d+)", Path(header).read_text())
    known = {name: int(number) for name, number in lines}
    column, _ = MACHINES[machine]
    ours = {name: numbers[column] for name, numbers in REFUSED.items()}
    ours |= {"socketpair": system_calls.SOCKETPAIR[column], "capset": system_calls.CAPSET[column]}
    assert {name: number for name, number in ours.items() if name in known} == {
        name: number for name, number in known.items() if name in ours
    }
    assert len(set(ours) & set(known)) > 40


def test_a_machine_without_a_filter_is_named() -> None:
    with pytest.raises(OSError, match="riscv64; there is one for x86_64, aarch64"):
        filter_program("riscv64")


@pytest.mark.parametrize(("expected", "got", "equal"), [
    (1, 1, True), (1, 1.0, False), (1, True, False), (0, False, False), (0.1 + 0.2, 0.3, True), (0.3, 0.31, False),
    (float("nan"), float("nan"), True), (float("inf"), float("inf"), True), ([1, 2], (1, 2), True),
    ([1, 2], [2, 1], False),
    ({1, 2}, {2, 1}, True), ({1, 2}, frozenset({1, 2}), False), ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
    ({"a": 1}, {"a": 1.0}, False), ({1: "x"}, {"1": "x"}, False), (None, 0, False), ("5", 5, False),
    (b"x", "x", False),
    (10**500, 10**500, True), (10**500, 10**500 + 1, False), ([[1], [2.0]], [(1,), [2.0 + 1e-13]], True),
    ([1, 2], {1, 2}, False), ({}, [], False), ("", [], False), (1j, 1j, True), ([1], [1, 1], False),
])
def test_values_are_compared_by_type_and_content(expected: Any, got: Any, equal: bool) -> None:
    trees = [json.loads(json.dumps(encode(value))) for value in (expected, got)]
    assert same(*trees) is equal
    for value, tree in zip((expected, got), trees, strict=True):
        again = decode(tree)
        assert type(again) is type(value) and (again == value or again != again)


@pytest.mark.parametrize("tree", [{"dict": 1}, {"what": []}, {"set": [[]]}, {"a": 1, "b": 2}, {"int": "x"}, {}])
def test_what_is_no_encoded_data_is_refused(tree: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode(tree)


@pytest.mark.parametrize(("tests", "message"), [
    ([], "at least one"), (None, "tests are None"), (5, "tests are 5"), (["assert ("], "not Python"),
    ([""], "a test is ''"),
    ([{"input": "1"}], "a test is"), ([{"call": "f", "args": 3, "expected": 1}], "a test is"),
    ([{"call": "f", "args": []}], "a test is"), ([{"call": "f", "expected": 1, "extra": 2}], "a test is"),
    ([{"input": 1, "output": "1"}], "a test is"),
    ([{"input": "\ud800", "output": "1"}], "a test is {'input': '\\ud800', 'output': '1'}; it is not valid Unicode"),
    ([{"input": "1", "output": "\ud800"}], "it is not valid Unicode"),
])
def test_a_row_whose_tests_cannot_be_read_is_named(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_cases(tests)


def test_tests_may_be_json_and_may_have_empty_columns() -> None:
    (call, program, nothing) = read_cases(json.dumps([
        {"call": "f", "args": [1], "expected": None, "input": None}, {"input": "", "output": "x", "call": None},
        "assert True",
    ]))
    assert (call.name, call.expected, program.stdout, nothing.names) == ("f", None, "x", ())  # type: ignore[union-attr]
    assert len(read_cases("assert [f(1)] == [2]")) == 1
    assert len(read_cases("[f(1)]")) == 1  # no JSON: a line of Python that starts with a bracket
