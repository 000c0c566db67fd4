"""Code that wants too much: time, memory, output, files. Each must end in time, with the verdict of its own limit."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from lowmem_grpo.rewards.sandbox.cases import read_cases
from lowmem_grpo.rewards.sandbox.trial import Sandbox, run_tests
from tests.attacks.attack import Verdict

SECONDS = 0.4  # that a flood has
AT_ONCE = 4  # most of them wait for a limit
PATIENCE = 15.0  # seconds until its end that a busy machine may need
CALL = {"call": "add", "args": [2, 3], "expected": 5}
ADD = "def add(a, b):\n"
MANY = ADD + "    import os, time\n    for n in range(1, 400):\n        time.sleep(0.002)\n"
ALL_IGNORED = "import signal\nfor n in range(1, 65):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n" \
              "    except (OSError, ValueError):\n        pass\n"
ANSWERED = ("too much output", "answers that are none")  # also asked by a test that runs in a process of its own
FLOODS: dict[str, list[tuple[str, str]]] = {  # by kind: allowed outcomes, and the code
    "endless time": [
        ("timeout", "while True: pass"), ("timeout", ADD + "    while True: pass"),
        ("timeout", ALL_IGNORED + ADD + "    while True: pass"), ("timeout", "import time\ntime.sleep(10**6)"),
        ("timeout", ADD + "    import signal\n    signal.pause()"), ("timeout", ADD + "    return 3 ** 10**8"),
        ("timeout", "import re\n" + ADD + "    re.match('(a+)+$', 'a' * 40 + 'b')"),
        ("timeout", ADD + "    import select\n    select.select([], [], [])"),
        ("timeout", ADD + "    yield from iter(int, 1)"),
        ("timeout", ADD + "    return sum(iter(int, 1))"), ("timeout", "import threading\nthreading.Event().wait()"),
        ("timeout", "def add(a, b):\n    try:\n        while True: pass\n    finally:\n        while True: pass"),
        ("timeout",
            "class Slow(dict):\n    def items(self):\n        while True: pass\n" + ADD + "    return Slow(a=1)"),
        ("timeout error",
            "import os\nfor n in range(64):\n    try:\n        os.close(n)\n    except OSError:\n        pass\n"
                          "while True: pass"),
        ("timeout", "import sys\ndef trace(*a):\n    while True: pass\nsys.settrace(trace)\n" + ADD + "    return 0"),
        ("timeout",
            ALL_IGNORED + "import atexit\natexit.register(lambda: sum(iter(int, 1)))\n" + ADD + "    while True: pass"),
    ],
    "too much memory": [
        ("memory", ADD + "    return [0] * 10**9"), ("memory", "grown = [0] * 10**9"),
        ("memory", ADD + "    x = []\n    while True:\n        x.append(bytes(10**6))"),
        ("memory", "x = bytearray(10**9)"),
        ("memory error timeout", ADD + "    return eval('[' * 10**5)"),
        ("memory error", ADD + "    return '%1000000000d' % 1"),
        ("memory error", ADD + "    import mmap\n    mmap.mmap(-1, 10**9)"),
        ("memory timeout", "import itertools\nx = list(itertools.count())"),
    ],
    "too much output": [
        *(("output", f"import os\n{start}    {way}") for start in ("while True:\n", f"{ADD}    while True:\n    ")
          for way in ("print('x' * 1000)", "os.write(2, b'x' * 1000)", "print('x' * 1000, flush=True)")),
        ("output", ADD + "    return 'x' * 10**6"), ("output", ADD + "    return list(range(10**6))"),
        ("output error", ADD + "    raise ValueError('x' * 10**6)"),
        ("output error timeout",
            "import os\n" + ADD + "    while True:\n        for n in range(3, 40):\n            try:\n"
                         "                os.write(n, b'x' * 10**5)\n"
                         "            except OSError:\n                pass"),
    ],
    "answers that are none": [
        ("error", ADD + "    x = []\n    for _ in range(10**5):\n        x = [x]\n    return x"),
        ("failed error", ADD + "    return object()"),
        ("error", ADD + "    x = []\n    x.append(x)\n    return x"), ("error", ADD + "    raise SystemExit"),
        ("error", ADD + "    raise KeyboardInterrupt"),
        ("failed error", ADD + "    x = []\n    for _ in range(400):\n        x = [x]\n    return x"),
        ("failed", ADD + "    return float('nan')"), ("failed", ADD + "    return 10**5000"),
        ("failed", ADD + "    return '\\ud800'"),
        ("failed error", ADD + "    return {float('nan'): 1, (): {}}"),
        ("error", "import os\nos.kill(os.getpid(), 9)"), ("error", "import ctypes\nctypes.string_at(0)"),
        ("error memory timeout", "import sys\nsys.setrecursionlimit(10**8)\nf = lambda: f()\nf()"),
        ("error", ADD + "    import os\n    os.abort()"),
        ("error timeout",
            ADD + "    import socket\n    socket.fromfd(3, socket.AF_UNIX, socket.SOCK_STREAM).shutdown(2)"),
    ],
    "too many files": [
        *(("files", MANY + f"        {way}") for way in (
            "open(f'{n}', 'w').close()", "os.makedirs('/'.join('d' * n))", "os.symlink('/nowhere', f'{n}')",
            "os.mkdir(f'{n}', 0)",
            "os.mkdir('d'); os.chdir('d')", "os.mkdir(f'{n}', 0); open(f'x{n}', 'w').close()")),
        ("files error", MANY + "        open(f'{n % 30}', 'ab').write(bytes(10**5))"),
        ("files error", MANY + "        os.close(os.open(f'{n}' * 9, os.O_CREAT | os.O_EXCL))"),
        ("error", ADD + "    open('big', 'wb').truncate(10**10)"),
        ("error", ADD + "    open('big', 'wb').write(bytes(10**7))"),
        ("error", ADD + "    kept = [open('/dev/null') for _ in range(500)]"),
    ],
}


def floods(sandbox: Sandbox) -> Iterator[Verdict]:
    """A verdict for each flood: it succeeds if it is not stopped in time, or by another limit than its own. Several
    run at once, each in a process of its own."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(partial(flood, sandbox), *zip(*(
            (kind, allowed, code) for kind, codes in FLOODS.items() for allowed, code in codes), strict=True))


def flood(sandbox: Sandbox, kind: str, allowed: str, code: str) -> Verdict:
    """The verdict of one flood."""
    seconds, total = (SECONDS, 4 * SECONDS) if "timeout" in allowed else (PATIENCE, PATIENCE)
    limited = Sandbox(sandbox.isolation, replace(sandbox.limits, seconds=seconds, total_seconds=total))
    began = time.monotonic()
    found = run_tests(code, read_cases([CALL, "assert add(2, 3) == 5"] if kind in ANSWERED else [CALL]), limited)
    took = time.monotonic() - began
    wrong = [verdict for verdict in found if verdict.outcome not in allowed.split()]
    damage = f"its test {wrong[0].outcome} ({wrong[0].reason[:200]})" if wrong else ""
    return Verdict(f"{sandbox.isolation}: {kind}", repr(code),
                   f"it took {took:.1f} s" if took > PATIENCE + SECONDS else damage)
