"""What ends leaves no process that nobody reaps."""

import subprocess
import sys
from pathlib import Path

from lowmem_grpo.rewards.sandbox.trial import Sandbox
from lowmem_grpo.rewards.sandbox.worker import children_of, kill

LAUNCHER = """
import os, time
child = os.fork()
if child == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    time.sleep(100)
else:
    os.waitpid(child, 0)
"""
REAPER = """
import ctypes, os
from lowmem_grpo.rewards.sandbox.cases import read_cases
from lowmem_grpo.rewards.sandbox.trial import Sandbox
from lowmem_grpo.rewards.sandbox.limits import Limits
from lowmem_grpo.rewards.sandbox.trial import run_tests
from lowmem_grpo.rewards.sandbox.worker import children_of
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # orphans come to this process, which reaps none
for code in ("def add(a, b):\\n    return a + b", "while True: pass", "import os\\nos._exit(0)"):
    run_tests(code, read_cases(["assert add(2, 3) == 5", {{"input": "", "output": "5"}}]),
              Sandbox({!r}, Limits(seconds=0.3)))
print(children_of(os.getpid()))
"""


def test_a_completion_leaves_no_process_to_be_reaped(sandbox: Sandbox) -> None:
    found = subprocess.run([sys.executable, "-c", REAPER.format(sandbox.isolation)], stdout=subprocess.PIPE, text=True,
                           timeout=120, check=True)
    assert found.stdout == "[]\n"


def test_a_launcher_that_is_killed_sees_the_end_of_its_child_first() -> None:
    """As bwrap does it, on a machine that has none."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        child = int(launcher.stdout.readline())
        assert children_of(launcher.pid) == [child]
        kill(launcher)
        assert launcher.wait(60) == 0  # it ended by itself, after it had reaped its child
        assert not Path(f"/proc/{child}").exists()
    finally:
        launcher.kill()
        launcher.communicate()
