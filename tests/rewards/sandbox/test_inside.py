"""What model-written code can do inside the sandbox, in every isolation that works here, and what is left of it.

What it cannot do is in `tests/attacks`, and `tests/attacks/test_sandbox_and_judge.py` runs that."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sandboxed import CALL, attempts, outcome

from lowmem_grpo.rewards.sandbox.limits import MIB, Limits
from lowmem_grpo.rewards.sandbox.trial import Sandbox

NEEDED = [
    "sqlite3.connect('a.db').execute('create table a (b)'); return os.path.getsize('a.db') > 0",
    "pathlib.Path('a').touch(); pathlib.Path('a').touch(); return pathlib.Path('a').exists()",
    "with tempfile.TemporaryFile() as f:\n    f.write(b'x'); f.seek(0); return f.read() == b'x'",
    "with tempfile.TemporaryDirectory() as d:\n    open(d + '/x', 'w').close(); return os.listdir(d) == ['x']",
    "with zipfile.ZipFile('a.zip', 'w') as z:\n    z.writestr('b', 'c')\n"
    "return zipfile.ZipFile('a.zip').read('b') == b'c'",
    "open('b', 'w').write('x'); shutil.copyfile('b', 'c')\n"
    "os.rename('c', 'd'); return sorted(glob.glob('[bd]')) == ['b', 'd']",
    "m = mmap.mmap(-1, 100); m[:2] = b'ab'; return m[:2] == b'ab'",
    "return len(os.urandom(4)) == 4 and random.random() < 1",
    "time.sleep(0.001); return datetime.datetime.now(zoneinfo.ZoneInfo('UTC')).year > 2000",
    "a, b = socket.socketpair(); a.setblocking(False); b.send(b'x'); return a.recv(9) == b'x'",
    "a, b = os.pipe(); os.set_inheritable(a, True); os.write(b, b'x'); return select.select([a], [], [], 1)[0] == [a]",
    "s = selectors.DefaultSelector(); s.register(os.pipe()[0], 1); return s.select(0.001) == []",
    "with threading.Lock():\n    return queue.Queue().qsize() == 0", "return ctypes.CDLL(None).abs(-5) == 5",
    "done = []; signal.signal(signal.SIGALRM, lambda *a: done.append(1))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.001)\n"
    "while not done:\n    time.sleep(0.001)\n"
    "return done == [1]",
    "return os.cpu_count() > 0 and os.getpid() > 0 and os.uname().sysname == 'Linux'",
    "print('x', flush=True); return not sys.stdout.isatty()",
    "return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0",
    "os.makedirs('p/q'); os.symlink('q', 'p/r'); shutil.rmtree('p'); return not os.path.exists('p')",
    "fcntl.lockf(open('lock', 'w'), fcntl.LOCK_EX); return True",
    "return hashlib.sha256(b'').hexdigest()[0] == 'e'", "return asyncio.run(asyncio.sleep(0.01, 7)) == 7",
]
MODULES = "asyncio, ctypes, datetime, fcntl, glob, hashlib, mmap, os, pathlib, queue, random, resource, select, " \
          "selectors, shutil, signal, socket, sqlite3, sys, tempfile, threading, time, zipfile, zoneinfo"


def test_what_computations_need_is_allowed(sandbox: Sandbox) -> None:
    found = attempts(sandbox, MODULES, NEEDED)
    assert found == dict.fromkeys(NEEDED, True)


def test_cpu_time_is_limited_apart_from_the_clock(sandbox: Sandbox) -> None:
    patient = Sandbox(sandbox.isolation, Limits(seconds=60, total_seconds=1, memory_bytes=128 * MIB))
    with patient.start("program", "while True: pass", stdin="") as worker:
        worker.run_to_end(time.monotonic() + 120)
        assert worker.ended().outcome == "timeout" and "CPU time" in worker.ended().reason


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
from lowmem_grpo.rewards.sandbox.trial import Sandbox
from lowmem_grpo.rewards.sandbox.limits import Limits
worker = Sandbox({!r}, Limits()).start("serve", "while True: pass")
print("started", flush=True)
"""


def test_a_program_that_ends_in_between_leaves_nothing(sandbox: Sandbox, tmp_path: Path) -> None:
    """No process either: `nothing_left_behind` looks for orphans."""
    ended = subprocess.run([sys.executable, "-c", ENDS_EARLY.format(sandbox.isolation)], capture_output=True,
                           env={**os.environ, "TMPDIR": str(tmp_path)}, timeout=120, check=True)
    assert ended.stdout == b"started\n" and os.listdir(tmp_path) == []
