"""What a killed program leaves: no process that nobody reaps, and no folder for ever."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lowmem_grpo.rewards.sandbox.isolation import Sandbox
from lowmem_grpo.rewards.sandbox.scratch import PREFIX, ScratchFolder, sweep
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
from lowmem_grpo.rewards.sandbox.isolation import Sandbox
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


@pytest.fixture
def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_that_a_killed_program_left_goes_a_day_later_and_a_newer_one_stays(below: Path) -> None:
    lost, kept = (Path(tempfile.mkdtemp(prefix=PREFIX)) for _ in range(2))
    (lost / "locked").mkdir(0)
    os.utime(lost, (0, 0))
    ours = ScratchFolder()
    assert sorted(below.iterdir()) == sorted([kept, Path(ours.path)])
    ours.remove()


def test_what_is_no_folder_of_ours_is_not_removed(below: Path) -> None:
    outside = below.parent / f"{below.name}-outside"
    outside.mkdir()
    (outside / "kept.txt").write_text("kept")
    (below / f"{PREFIX}link").symlink_to(outside)
    (below / f"{PREFIX}file").write_text("ours?")
    (below / "sandbox-x").mkdir()
    for path in below.iterdir():
        os.utime(path, (0, 0), follow_symlinks=False)
    sweep(str(below))
    assert len(os.listdir(below)) == 3 and (outside / "kept.txt").read_text() == "kept"
