"""The keeper of a run: the time limit, the stop, and what is left when the keeper or the run is killed."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from programs import until

from lowmem_grpo.server.jobs import keeper
from lowmem_grpo.server.jobs.keeper import ENDED, RUN
from lowmem_grpo.server.page.run_follower import json_file

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="jobs need the locks of Linux and macOS")
STUBBORN = """
import signal, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
threading.Event().wait(600)"""
POLITE = """
import signal, sys, threading
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
threading.Event().wait(600)"""
WITH_A_CHILD = """
import subprocess
subprocess.Popen(["sh", "-c", "echo lives; exec sleep 600"], stdout=open({pipe!r}, "w"))""" + STUBBORN
KEEPER = """
import sys
from pathlib import Path
from lowmem_grpo.server.jobs import keeper
keeper.GRACE = float(sys.argv[1])
keeper.run_command(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])"""
LONGEST = 400  # seconds until a keeper that hangs fails its test
Keep = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Keep]:
    """Starts a keeper of a small program, which is killed at the end."""
    started = list[subprocess.Popen[bytes]]()

    def begin(code: str, time_limit: float = float("inf"), grace: float = keeper.GRACE) -> subprocess.Popen[bytes]:
        words = [str(tmp_path), str(time_limit), sys.executable, "-c", code]
        started.append(subprocess.Popen([sys.executable, "-c", KEEPER, str(grace), *words]))
        return started[-1]

    yield begin
    for one in started:
        one.kill()
        one.wait(60)
    keeper.ask_to_stop(tmp_path)


def ready(folder: Path) -> None:
    until(lambda: "ready" in log(folder))


def log(folder: Path) -> str:
    return (folder / keeper.LOG).read_text() if (folder / keeper.LOG).exists() else ""


def outcome(folder: Path) -> tuple[int | None, str | None]:
    ended = json_file(folder / ENDED)
    return ended.get("code"), ended.get("why")


def test_the_end_and_the_words_of_a_run_are_kept(tmp_path: Path, keep: Keep) -> None:
    assert not keeper.is_alive(tmp_path / "none") and outcome(tmp_path) == (None, None)
    keep("import sys; print('said'); sys.exit(3)").wait(LONGEST)
    assert outcome(tmp_path) == (3, None)
    assert log(tmp_path) == "said\n" and not keeper.is_alive(tmp_path)


def test_a_run_over_its_time_limit_is_asked_to_stop(tmp_path: Path, keep: Keep) -> None:
    keep("import threading; threading.Event().wait(600)", time_limit=0.01).wait(LONGEST)
    assert outcome(tmp_path) == (-signal.SIGTERM, "its time limit of 0.01 s was over")


def test_a_run_that_does_not_stop_is_killed_with_all_it_started(tmp_path: Path, keep: Keep) -> None:
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    started = keep(WITH_A_CHILD.format(pipe=str(tmp_path / "pipe")), grace=0.1)
    ready(tmp_path)
    assert heard(pipe) == b"lives\n"
    keeper.ask_to_stop(tmp_path)
    started.wait(LONGEST)
    assert outcome(tmp_path) == (-signal.SIGKILL, "stopped as asked")
    assert heard(pipe) == b"", "the child has ended"
    os.close(pipe)


def heard(pipe: int) -> bytes:
    """The next words of a child; none when it has ended."""
    assert select.select([pipe], [], [], LONGEST)[0], "the child lives, and says nothing"
    return os.read(pipe, 100)


def test_two_keepers_never_run_one_start_of_a_job_twice(tmp_path: Path, keep: Keep) -> None:
    first = keep(POLITE)
    ready(tmp_path)
    keep(POLITE).wait(LONGEST)
    assert log(tmp_path).count("ready") == 1
    keeper.ask_to_stop(tmp_path)
    first.wait(LONGEST)
    keep(POLITE).wait(LONGEST)  # the same start again, which has ended
    assert log(tmp_path).count("ready") == 1


def test_a_run_whose_keeper_was_killed_is_seen_and_can_be_stopped(tmp_path: Path, keep: Keep) -> None:
    started = keep(POLITE)
    ready(tmp_path)
    started.kill()
    started.wait(LONGEST)
    assert keeper.is_alive(tmp_path)
    keeper.ask_to_stop(tmp_path)
    until(lambda: not keeper.is_alive(tmp_path))
    assert not (tmp_path / ENDED).exists()


def test_a_killed_run_is_told_from_one_that_failed(tmp_path: Path, keep: Keep) -> None:
    started = keep(POLITE)
    ready(tmp_path)
    os.kill(int((tmp_path / RUN).read_text()), signal.SIGKILL)
    started.wait(LONGEST)
    assert outcome(tmp_path) == (-signal.SIGKILL, None)
