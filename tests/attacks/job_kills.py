"""A queue of jobs whose server, keepers and runs are killed at seeded moments: none is lost, none runs twice.

    python -m tests.attacks.job_kills                 100 kills, a few minutes on two cores
    python -m tests.attacks.job_kills --count 12

Each job writes the numbers 1 to 40 into a file, a line at a time, and goes on after the last one where it is resumed,
as a run goes on from its checkpoint. Meanwhile one of these is killed: the server, the keeper of a job, the run, or all
of them at once, as when a machine stops. A new server is started where there is none. A job whose run was killed is
resumed, as its user would. An attack has succeeded where a job does not come to its end, a number is missing or stands
twice, or two processes ran one job at the same time.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lowmem_grpo.server.jobs import keeper
from lowmem_grpo.server.jobs.queue import DONE, FAILED, OVER, STOPPED, Job, JobQueue, JobRequest
from lowmem_grpo.server.server_dir import Database
from tests.attacks.attack import Verdict, kills_command

NUMBERS, PAUSE = 40, 0.04
KINDS = ("the server", "the keeper", "the run", "everything")
LONGEST = 400.0  # seconds that a job may take to come to its end
RECIPE = f'''
import fcntl, os, sys, time
from pathlib import Path
from lowmem_grpo.recipes.options import RecipeOptions
OPTIONS = RecipeOptions

def run(options):
    folder = Path(options.config["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "numbers", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            (folder / "twice").touch()
            sys.exit("another process runs this job")
        file.seek(0)
        for number in range(len(file.read().split()) + 1, {NUMBERS} + 1):
            time.sleep({PAUSE})
            file.write(f"{{number}}\\n")
            file.flush()
'''
SERVER = """
import sys
from pathlib import Path
from lowmem_grpo.server.jobs import dispatcher
from lowmem_grpo.server.jobs.queue import JobQueue
from lowmem_grpo.server.server_dir import ServerDir
dispatcher.EVERY, dispatcher.COMES_UP = 0.05, 3.0
home = ServerDir(Path(sys.argv[1]))
with home.owned() as database:
    dispatcher.Dispatcher(JobQueue(database, home.jobs), Path(sys.argv[2])).work()
"""


@dataclass
class Place:
    """A server's folder, and the server that has it now."""

    root: Path
    server: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        (self.root / "recipes").mkdir()
        (self.root / "recipes" / "count.py").write_text(RECIPE)
        self.queue = JobQueue(Database(self.root / "home" / "server.sqlite"), self.root / "home" / "jobs")
        self.serve()

    def serve(self) -> None:
        words = [sys.executable, "-c", SERVER, str(self.root / "home"), str(self.root / "recipes")]
        self.server = subprocess.Popen(words)

    def kill_server(self) -> None:
        self.server.kill()
        self.server.wait()

    def close(self) -> None:
        self.kill_server()
        for job in self.queue.live():
            kill(self.keeper_of(job), self.run_of(job))
        self.queue.database.close()

    def run_of(self, job: Job) -> int | None:
        """The process of a job's run, where it lives."""
        path = self.queue.folder_of(job) / keeper.RUN
        return int(path.read_text()) if keeper.is_held(path) and path.read_text().strip() else None

    def keeper_of(self, job: Job) -> int | None:
        """The process of its keeper, by its command line."""
        wanted = [b"lowmem_grpo.server.jobs.keeper", str(self.queue.folder_of(job)).encode()]  # after python -m
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if entry.read_bytes().rstrip(b"\0").split(b"\0")[2:4] == wanted:
                    return int(entry.parent.name)
            except (FileNotFoundError, ProcessLookupError):
                continue
        return None


def kill(*pids: int | None) -> None:
    """All of these that live."""
    for pid in pids:
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def strike(kind: str, place: Place, job: Job) -> None:
    """Kill what `kind` says, and start a new server where there is none."""
    if kind in ("the server", "everything"):
        place.kill_server()
    if kind in ("the keeper", "everything"):
        kill(place.keeper_of(job))
    if kind in ("the run", "everything"):
        kill(place.run_of(job))
    if place.server.returncode is not None:
        place.serve()


def until(holds: Callable[[], bool]) -> bool:
    """Whether it holds before long."""
    limit = time.monotonic() + LONGEST
    while not holds():
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


def attacked(kind: str, place: Place, moment: float) -> str:
    """What is wrong with a job after a kill so many seconds after it began; "" for nothing."""
    job = place.queue.submit(JobRequest("count.py"), "me")
    if not until(lambda: place.queue.one(job.id).state != "waiting"):
        return f"it did not begin: {place.queue.one(job.id).why}"
    time.sleep(moment)
    strike(kind, place, place.queue.one(job.id))
    if not until(lambda: place.queue.one(job.id).state in OVER):
        return f"it did not end: {place.queue.one(job.id)}"
    if kind == "the run" and place.queue.one(job.id).state in (FAILED, STOPPED):
        place.queue.resume(job.id, [])
        until(lambda: place.queue.one(job.id).state in (DONE, FAILED, STOPPED))
    return wrong(place.queue.one(job.id), place.queue.folder_of(job) / "run")


def wrong(job: Job, run: Path) -> str:
    """What is wrong with a job that is over."""
    if job.state != DONE:
        return f"it is {job.state}: {job.why}"
    if (run / "twice").exists():
        return "two processes ran it at the same time"
    numbers = (run / "numbers").read_text().split()
    return "" if numbers == [str(n) for n in range(1, NUMBERS + 1)] else f"it wrote {len(numbers)} numbers: {numbers}"


def attack(root: Path, count: int, seed: int) -> Iterator[Verdict]:
    """So many kills, of each kind in turn, at seeded moments from before a job's first line to after its last."""
    place, moments = Place(root), random.Random(seed)
    try:
        for number in range(count):
            kind, moment = KINDS[number % len(KINDS)], moments.uniform(0.0, 1.5 * NUMBERS * PAUSE)
            yield Verdict(kind, f"kill {number}, {moment:.2f} s after it began", attacked(kind, place, moment))
    finally:
        place.close()


if __name__ == "__main__":
    kills_command(__doc__, 100, attack)()
