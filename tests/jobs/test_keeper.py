"""The keeper of a run: its time limit, its stop, what is left when either of them is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo.jobs import process
from lowmem_grpo.jobs.keeper import ENDED, ORDER, RUN

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="jobs need the locks of Linux and macOS")
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)"""
POLITE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(60)"""
WITH_A_CHILD = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(61)"])""" + STUBBORN


def keep(folder: Path, code: str, **order: Any) -> subprocess.Popen[bytes]:
    """A keeper of a small program."""
    command = [sys.executable, "-c", code]
    (folder / ORDER).write_text(json.dumps({"command": command, "time_limit": None, **order}))
    return subprocess.Popen([sys.executable, "-m", "lowmem_grpo.jobs.keeper", str(folder)])


def until(holds: Callable[[], object], seconds: float = 20.0) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.02)


def ready(folder: Path) -> None:
    until(lambda: "ready" in log(folder))


def log(folder: Path) -> str:
    return (folder / process.LOG).read_text() if (folder / process.LOG).exists() else ""


def test_the_end_and_the_words_of_a_run_are_kept(tmp_path: Path) -> None:
    keep(tmp_path, "import sys; print('said'); sys.exit(3)").wait(20)
    ended = process.ended(tmp_path)
    assert ended is not None and (ended["code"], ended["why"]) == (3, None)
    assert log(tmp_path) == "said\n" and not process.is_alive(tmp_path)


def test_a_run_over_its_time_limit_is_asked_to_stop(tmp_path: Path) -> None:
    keep(tmp_path, POLITE, time_limit=1.0).wait(20)
    ended = process.ended(tmp_path)
    assert ended is not None and (ended["code"], ended["why"]) == (7, "time")


def test_a_run_that_does_not_stop_is_killed_with_all_it_started(tmp_path: Path) -> None:
    keeper = keep(tmp_path, WITH_A_CHILD, grace=0.3)
    ready(tmp_path)
    process.stop(tmp_path)
    keeper.wait(20)
    ended = process.ended(tmp_path)
    assert ended is not None and (ended["code"], ended["why"]) == (-9, "asked")
    left = subprocess.run(["pgrep", "-f", "time.sleep(61)$"], capture_output=True, text=True, check=False)
    assert left.stdout == ""


def test_two_keepers_never_start_one_go_twice(tmp_path: Path) -> None:
    first = keep(tmp_path, POLITE)
    ready(tmp_path)
    keep(tmp_path, POLITE).wait(20)
    assert log(tmp_path).count("ready") == 1
    process.stop(tmp_path)
    first.wait(20)
    keep(tmp_path, POLITE).wait(20)  # the same go again, which has ended
    assert log(tmp_path).count("ready") == 1


def test_a_run_whose_keeper_was_killed_is_seen_and_can_be_stopped(tmp_path: Path) -> None:
    keeper = keep(tmp_path, POLITE)
    ready(tmp_path)
    keeper.kill()
    keeper.wait(20)
    assert process.is_alive(tmp_path)
    process.stop(tmp_path)
    until(lambda: not process.is_alive(tmp_path))
    assert not (tmp_path / ENDED).exists()


def test_a_killed_run_is_told_from_one_that_failed(tmp_path: Path) -> None:
    keeper = keep(tmp_path, POLITE)
    ready(tmp_path)
    os.kill(int((tmp_path / RUN).read_text()), signal.SIGKILL)
    keeper.wait(20)
    ended = process.ended(tmp_path)
    assert ended is not None and (ended["code"], ended["why"]) == (-9, None)


def test_nobody_at_work_is_not_alive(tmp_path: Path) -> None:
    assert not process.is_alive(tmp_path / "none") and process.ended(tmp_path) is None
