"""The process that keeps one go of a job: it starts the run, enforces its time limit, and writes down how it ended.

    python -m lowmem_grpo.jobs.keeper FOLDER

It is no child of the server's life: the server may be killed and started again meanwhile. Only the standard library is
imported. FOLDER/keeper.lock is held by the keeper, FOLDER/run.lock by the run and what it started: the system gives
both back when these end, however they end. A file FOLDER/stop asks for the end.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ORDER, STOP, LOG, ENDED = "go.json", "stop", "log.txt", "ended.json"
KEEPER, RUN = "keeper.lock", "run.lock"
GRACE = 120.0  # seconds from the first signal until the run is killed: a step may take long, and is then saved
LOOK = 0.1  # seconds between looks at the run
BY_TIME, BY_ASKING = "time", "asked"


class Keeper:
    """Holds one run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.order = folder, json.loads((folder / ORDER).read_text(encoding="utf-8"))
        self.asked = False  # by a signal
        self.why: str | None = None  # why the run was told to end
        self.until: float | None = None  # when a run that was told to end is killed
        signal.signal(signal.SIGTERM, self.on_signal)
        lock = held(folder / RUN)
        with open(folder / LOG, "ab") as log:
            self.run = subprocess.Popen(
                self.order["command"], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True, pass_fds=(lock,))
        os.pwrite(lock, f"{self.run.pid:>20}".encode(), 0)
        os.close(lock)  # the run has it

    def on_signal(self, *_: Any) -> None:
        self.asked = True

    def keep(self) -> None:
        """Wait for the end of the run, and write it down."""
        began, limit = time.monotonic(), self.order["time_limit"]
        while (code := self.run.poll()) is None:
            now = time.monotonic()
            if self.asked or (self.folder / STOP).exists():
                self.stop(BY_ASKING, now)
            elif limit is not None and now - began > limit:
                self.stop(BY_TIME, now)
            if self.until is not None and now > self.until:
                self.kill()
            time.sleep(LOOK)
        self.kill()  # what the run itself has started and left
        write(self.folder / ENDED, {"code": code, "why": self.why, "at": time.time()})

    def stop(self, why: str, now: float) -> None:
        """Ask the run to stop after its step; a second time changes nothing."""
        if self.until is None:
            self.why, self.until = why, now + self.order.get("grace", GRACE)
            with contextlib.suppress(ProcessLookupError):
                self.run.terminate()

    def kill(self) -> None:
        """The run and all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.run.pid, signal.SIGKILL)


def held(path: Path) -> int:
    """The file, open and locked. BlockingIOError where another process holds it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise
    return file


def write(path: Path, content: dict[str, Any]) -> None:
    """The whole file or none of it."""
    aside = path.with_suffix(".new")
    with open(aside, "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def main(folder: Path) -> None:
    try:
        held(folder / KEEPER)  # to the end of this process
    except BlockingIOError:
        return  # another keeper was started for the same go
    if not (folder / ENDED).exists():
        Keeper(folder).keep()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
