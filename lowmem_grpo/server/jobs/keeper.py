"""The keeper: a process that runs a job's command once, and outlives the server; and functions that control it.

    python -m lowmem_grpo.server.jobs.keeper FOLDER SECONDS COMMAND ...

The keeper stops the command after SECONDS (`inf`: no limit) or when the file FOLDER/stop appears, and writes how it
ended to FOLDER/ended.json. The keeper locks FOLDER/keeper.lock, and the command and its children hold FOLDER/run.lock:
the kernel releases a lock when its holders exit."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lowmem_grpo.runs.files import flush, lock_file, move
from lowmem_grpo.utils import time_text

STOP, LOG, ENDED = "stop", "log.txt", "ended.json"
KEEPER, RUN = "keeper.lock", "run.lock"
GRACE = 120.0  # seconds from SIGTERM to SIGKILL: the run finishes its step, which may be long, and saves
LOOK = 0.1  # seconds between polls of the run


def run_command(folder: Path, time_limit: float, command: Sequence[str]) -> None:
    """Run a command, stop it when the file STOP appears or after `time_limit` seconds, and write ENDED. If ENDED
    exists, do nothing. BlockingIOError if another keeper runs in this folder."""
    lock_file(folder / KEEPER)  # held until this process exits
    if (folder / ENDED).exists():
        return
    signal.signal(signal.SIGTERM, lambda *_: (folder / STOP).touch())
    lock = lock_file(folder / RUN)
    with open(folder / LOG, "ab") as log:
        run = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                               start_new_session=True, pass_fds=(lock,))
    os.pwrite(lock, f"{run.pid:>20}".encode(), 0)
    os.close(lock)  # the run holds it
    why, limit, killed_at = None, time.monotonic() + time_limit, float("inf")
    while (code := run.poll()) is None:
        now = time.monotonic()
        if why is None and ((folder / STOP).exists() or now > limit):
            why = f"its time limit of {time_text(time_limit)} was over" if now > limit else "stopped as asked"
            killed_at = now + GRACE
            run.terminate()
        if now > killed_at:
            kill_group(run.pid)
        time.sleep(LOOK)
    kill_group(run.pid)  # processes that the run started and left behind
    with open(folder / f"{ENDED}.new", "w", encoding="utf-8") as file:
        json.dump({"code": code, "why": why}, file)
    flush(Path(file.name))
    move(Path(file.name), folder / ENDED)


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def start_keeper(folder: Path, command: Sequence[str], time_limit: float | None) -> None:
    """Start a keeper in a session of its own, so that it survives this process."""
    keeper = [sys.executable, "-m", "lowmem_grpo.server.jobs.keeper", str(folder), str(time_limit or "inf")]
    with open(folder / LOG, "ab") as log:
        subprocess.Popen([*keeper, *command], stdout=log, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT,
                         start_new_session=True)


def ask_to_stop(folder: Path) -> None:
    """Ask the run in this folder to stop after its current step."""
    (folder / STOP).touch()
    if not is_held(folder / KEEPER) and is_held(folder / RUN):  # the run has lost its keeper
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int((folder / RUN).read_text()), signal.SIGTERM)


def is_alive(folder: Path) -> bool:
    return is_held(folder / KEEPER) or is_held(folder / RUN)


def is_held(path: Path) -> bool:
    try:
        if path.exists():
            os.close(lock_file(path))
    except BlockingIOError:
        return True
    return False


if __name__ == "__main__":
    with contextlib.suppress(BlockingIOError):
        run_command(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
