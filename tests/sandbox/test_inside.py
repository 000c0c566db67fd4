"""What model-written code cannot do inside the sandbox, in every isolation that works here."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sandboxed import ASSERT, CALL, answer, attempts, needs_a_closed_file_system, outcome, wrapped

from lowmem_grpo.sandbox.cases import read_cases
from lowmem_grpo.sandbox.isolation import Sandbox
from lowmem_grpo.sandbox.limits import MIB, Limits
from lowmem_grpo.sandbox.trial import run_tests

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
STARTS = [
    "os.fork()", "os.forkpty()[0]", "os.posix_spawn('/bin/true', ['true'], {})", "subprocess.Popen(['/bin/true']).pid",
    "multiprocessing.get_context('fork').Process(target=int).start() or 1", "int(os.system('true') == 0) or -1",
]


def test_no_second_process_can_be_started(sandbox: Sandbox) -> None:
    bodies = [BOUNDED_FORKS.replace("START", way) for way in STARTS]
    found = attempts(sandbox, "os, subprocess, multiprocessing", bodies)
    assert set(found.values()) <= {"PermissionError", "FileNotFoundError", 0}, found  # no pty, no program: nor a child


def test_the_kernel_itself_refuses_processes_threads_and_other_programs(sandbox: Sandbox) -> None:
    numbers = {"x86_64": (56, 435, 57, 58), "aarch64": (220, 435)}[os.uname().machine]  # clone, clone3, fork, vfork
    call = "libc = ctypes.CDLL(None, use_errno=True)\nresult = libc.syscall(ctypes.c_long({}), 17, 0, 0, 0, 0)\n" \
           "if result == 0:\n    os._exit(0)\nreturn result, ctypes.get_errno()"
    calls = [call.format(number) for number in numbers]
    thread, program = "threading.Thread(target=int).start()", "os.execv('/bin/sh', ['sh', '-c', 'true'])"
    found = attempts(sandbox, "ctypes, os, threading", [*calls, thread, program])
    assert [found[one] for one in calls] == [(-1, 1)] * len(numbers)
    assert (found[thread], found[program]) == ("RuntimeError", "PermissionError")


def test_code_that_would_outlive_its_killed_parent_dies_with_it(sandbox: Sandbox) -> None:
    """The fixture `nothing_left_behind` looks for what outlives the kill."""
    code = "import ctypes, time\nlibc = ctypes.CDLL(None, use_errno=True)\n" \
           "done = [(libc.prctl(*order), ctypes.get_errno()) for order in ((1, 0, 0, 0, 0), (4, 1, 0, 0, 0))]\n" \
           "def attempt(*args):\n    if args:\n        time.sleep(20)\n    return done\n"
    assert answer(sandbox, code) == [(-1, 1)] * 2  # PR_SET_PDEATHSIG, PR_SET_DUMPABLE
    quick = Sandbox(sandbox.isolation, replace(sandbox.limits, seconds=0.3))
    assert outcome(quick, code, {"call": "attempt", "args": [1], "expected": 0}) == ["timeout"]


def test_a_loop_that_ignores_every_signal_is_killed_in_time(sandbox: Sandbox) -> None:
    code = (
        "import signal\n"
        "for number in range(1, 65):\n"
        "    try:\n        signal.signal(number, signal.SIG_IGN)\n    except (OSError, ValueError):\n        pass\n"
        "def add(a, b):\n    while True:\n        pass\n"
    )
    began = time.monotonic()
    quick = Sandbox(sandbox.isolation, replace(sandbox.limits, seconds=0.5))
    assert outcome(quick, code, ASSERT) == ["timeout"]
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


BOMBS = [
    "return len(bytearray(10**9))", "grown = []\nwhile True:\n    grown.append('x' * 10**6 + str(len(grown)))",
    "import mmap\nreturn len(mmap.mmap(-1, 10**9))", "return len([0] * 10**9)",
]


def test_a_memory_bomb_stays_small(sandbox: Sandbox) -> None:
    code = "".join(f"def bomb_{number}():\n" + "".join(f"    {line}\n" for line in bomb.splitlines())
                   for number, bomb in enumerate(BOMBS))
    calls = [{"call": f"bomb_{number}", "expected": 5} for number in range(len(BOMBS))]
    for verdict in run_tests(code, read_cases(calls), sandbox):
        assert verdict.outcome == "memory" or "Cannot allocate memory" in verdict.reason, verdict


def test_memory_that_no_limit_counts_cannot_be_had(sandbox: Sandbox) -> None:
    shared = "return ctypes.CDLL(None).shmget(0, 10**8, 0o1600)"
    nameless = "os.ftruncate(os.memfd_create('x'), 10**9)"
    pieces = "os.write(os.memfd_create('x'), bytes(10))\nreturn 'written'"  # each smaller than a file may be
    found = attempts(sandbox, "ctypes, os", [shared, nameless, pieces])
    assert found == {shared: -1, nameless: "PermissionError", pieces: "PermissionError"}


@pytest.mark.parametrize("writes", ["print('x' * 1000)", "os.write(2, b'x' * 1000)"])
def test_endless_output_ends_the_process(sandbox: Sandbox, writes: str) -> None:
    assert outcome(sandbox, f"import os\ndef add(a, b):\n    while True:\n        {writes}\n", ASSERT) == ["output"]
    assert outcome(sandbox, f"import os\nwhile True:\n    {writes}\n", CALL) == ["output"]


ANSWERS = [
    ("return 'x' * 10**6", "output"), ("yield from iter(int, 1)", "timeout memory"),
    ("x = []\n    for _ in range(10**5):\n        x = [x]\n    return x", "error"), ("return object()", "error"),
    ("x = []\n    x.append(x)\n    return x", "error"), ("raise SystemExit", "error"),
    ("raise KeyboardInterrupt", "error"),
    ("x = []\n    for _ in range(400):\n        x = [x]\n    return x", "failed error"),  # Python's depth decides
]


def test_an_answer_that_is_too_much_is_no_answer(sandbox: Sandbox) -> None:
    code = "".join(f"def answer_{number}():\n    {body}\n" for number, (body, _) in enumerate(ANSWERS))
    names = [f"answer_{number}" for number in range(len(ANSWERS))]
    calls, asserts = [{"call": name, "expected": 5} for name in names], [f"assert {name}() == 5" for name in names]
    quick = Sandbox(sandbox.isolation, replace(sandbox.limits, seconds=0.5))
    found = outcome(quick, code, *calls, *asserts)
    for verdict, (body, allowed) in zip(found, ANSWERS * 2, strict=True):
        assert verdict in allowed.split(), body


def test_a_file_is_limited_in_size(sandbox: Sandbox) -> None:
    write = "with open('big', 'wb') as f:\n    for _ in range(100):\n        f.write(bytes(10**5))"
    grow = "with open('big', 'wb') as f:\n    f.truncate(10**10)"
    assert attempts(sandbox, "os", [write, grow]) == {write: "OSError", grow: "OSError"}


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
    environment = "return sorted(set(os.environ) - {'LC_CTYPE', 'PWD'})"
    descriptors = "found = []\nfor n in range(40):\n    try:\n        os.fstat(n)\n        found.append(n)\n" \
                  "    except OSError:\n        pass\nreturn found"
    with (tmp_path / "open.txt").open("w") as ours:
        os.set_inheritable(ours.fileno(), True)
        found = attempts(sandbox, "os", [environment, descriptors, "return input()"])
    assert found[environment] == [] and found["return input()"] == "EOFError"
    assert found[descriptors][:3] == [0, 1, 2] and len(found[descriptors]) == 4  # the fourth carries answers


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
