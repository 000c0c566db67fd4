"""`RunSource`: the runs that a page shows; `RunsSource`: the runs below a folder, with states read from their files.
`JobsSource` in `jobs` is the other source: the jobs of a server."""

import os
import re
import signal
import socket
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from starlette.background import BackgroundTask
from starlette.responses import FileResponse

from lowmem_grpo.runs.lock import FILE, OWNER_BYTES, boot, is_alive
from lowmem_grpo.runs.records import EARLIER, FINAL, METRICS, SUMMARY, json_object
from lowmem_grpo.server.page.run_follower import LOG, end_of, json_file, open_plain
from lowmem_grpo.server.users import User
from lowmem_grpo.utils import time_text

DEPTH = 4  # levels below the watched folder that are searched for runs
MOST_FOLDERS, MOST_RUNS = 20_000, 500  # most run folders that are examined, and most runs that are shown
LAST_BYTES = 64 * 1024  # at the end of metrics.jsonl, searched for the last step
SILENT = 3600.0  # seconds without writes until a run of another machine no longer counts as running
LOCKS = Path("/proc/locks")
ENDED = ("finished", "failed", "interrupted")  # as in a summary
KEEP = 1.0  # seconds for which the list of runs is cached
SHARE = 0.1  # most of the time that may be spent searching for runs, if there are many
SAVED = (".json", ".safetensors", ".txt", ".jinja", ".model", ".md")  # suffixes that an export includes
STATES = ("optimizer", "scheduler", "rng", "trainer", "manifest")  # prefixes of files that an export leaves out
PIECE = 1024 * 1024  # bytes


@dataclass(frozen=True)
class Run:
    """A run: its name below the watched folder, its state, and the process that owns its lock."""

    name: str
    path: Path
    state: str
    owner: dict[str, Any]
    written: float  # seconds since 1970: the time of its newest record

    @property
    def can_stop(self) -> bool:
        return self.state == "running" and holds_lock(self.path / FILE, self.owner)

    @property
    def where(self) -> str:
        if self.state not in ("running", "silent"):
            return ""
        host = self.owner.get("host")
        return f"process {self.owner.get('pid')}" + (f" on {host}" if host != socket.gethostname() else "")


def runs_below(folder: Path) -> list[Run]:
    """Return the newest `MOST_RUNS` runs in and below a folder: running ones first, then by time."""
    paths = sorted(islice(run_folders(folder), MOST_FOLDERS), key=newest, reverse=True)
    runs = [run_of(path, folder) for path in paths[:MOST_RUNS]]
    return sorted(runs, key=lambda run: (run.state != "running", -run.written))


def run_folders(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield each folder, up to `depth` levels down, with a run's records or lock file."""
    if is_run(folder):
        yield folder
    try:
        inner = [each.name for each in os.scandir(folder) if each.is_dir(follow_symlinks=False)] if depth else []
    except OSError:
        inner = []
    for name in sorted(inner):
        if name != EARLIER and not name.startswith(("checkpoint-", ".")):
            yield from run_folders(folder / name, depth - 1)


def is_run(folder: Path) -> bool:
    """Return whether a folder has a run's records or lock file; false for a folder that cannot be read."""
    return any(os.path.isfile(folder / name) for name in (METRICS, SUMMARY, FILE))


def one_run(folder: Path, name: str) -> Run | None:
    """Return the run with this name; None if there is none, or the name leads out of the folder."""
    path = folder if name == "." else folder / name
    try:
        inside = path.resolve().is_relative_to(folder.resolve()) and ".." not in path.relative_to(folder).parts
        return run_of(path, folder) if inside and is_run(path) else None
    except (OSError, ValueError):  # a name with a null byte, too long, or an absolute path
        return None


def run_of(path: Path, folder: Path) -> Run:
    """Return the run in `path`, named by its path relative to `folder`."""
    owner, written = owner_of(path / FILE), newest(path)
    state = state_of(path, json_file(path / SUMMARY), owner, time.time() - written)
    return Run(path.relative_to(folder).as_posix(), path, state, owner, written)


def state_of(path: Path, summary: dict[str, Any], owner: dict[str, Any], age: float) -> str:
    """Return a run's state. If its process is alive, it is running; for a process of another machine, which cannot be
    checked, it is silent if it has written nothing for `SILENT` seconds. Otherwise the summary says how it ended; if it
    does not, or a later start left its lock file behind, the run was killed."""
    if owner and is_alive(owner):
        return "silent" if owner.get("host") != socket.gethostname() and age > SILENT else "running"
    status = str(summary.get("status") or "")
    if status in ENDED and not owner:
        return status
    return "killed" if owner or (path / METRICS).is_file() else "waiting"


def owner_of(path: Path) -> dict[str, Any]:
    """Return the process that a lock file names; empty if there is none."""
    try:
        return json_object(end_of(path, OWNER_BYTES))
    except ValueError:
        return {}


def newest(path: Path) -> float:
    """Return the time of a run's last write, in seconds since 1970; 0.0 if it has written nothing."""
    times = [0.0]
    for name in (METRICS, SUMMARY, FILE):
        with suppress(OSError):
            times.append((path / name).lstat().st_mtime)
    return max(times)


def holds_lock(path: Path, owner: dict[str, Any]) -> bool:
    """Return whether the kernel lists the lock as held by the owner's process, since its pid may have been reused."""
    if owner.get("host") != socket.gethostname() or owner.get("boot") != boot() or not is_alive(owner):
        return False
    try:
        wanted, lines = str(path.stat().st_ino), LOCKS.read_text().splitlines()
    except OSError:
        return False
    held = [line.split() for line in lines if "FLOCK" in line]
    return any(words[4] == str(owner.get("pid")) and words[5].rpartition(":")[2] == wanted for words in held
               if len(words) > 5)


def so_far(path: Path) -> str:
    """Return a text with a run's last step, its reward (or loss) and elapsed time; empty before the first step."""
    for line in reversed(end_of(path / METRICS, LAST_BYTES).splitlines()):
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            row = json_object(line)
            measured = next((f"{name} {row[name]:.3g}" for name in ("reward", "loss") if row.get(name) is not None), "")
            return " \u00b7 ".join(filter(None, (f"step {int(row['step']):,}", measured, time_text(row["elapsed"]))))
    return ""


def stop(run: Run) -> None:
    """Send SIGTERM to a run, which then stops after its step and saves. ValueError if its process is not reachable."""
    if not run.can_stop:
        why = f"{run.where} is not one of this machine that holds it" if run.where else f"it is {run.state}"
        raise ValueError(f"{run.name} cannot be stopped from here: {why}")
    os.kill(int(run.owner["pid"]), signal.SIGTERM)


@dataclass(frozen=True)
class Listed:
    """A run's entry in the page's list, with the actions of its buttons."""

    name: str  # its name in the page's URL
    title: str
    state: str  # running, finished, failed and so on; also its colour
    place: tuple[Path, Path]  # its folder and its log, which may not exist yet
    why: str = ""  # its progress, why it waits or ended, and its process
    written: float = 0.0  # seconds since 1970: time of submission or of the newest record; 0.0 is unknown
    actions: tuple[str, ...] = ()  # what can be done with it: stop, resume, export
    can_show: bool = True  # whether it has begun to write


class RunSource(Protocol):
    """A source of runs for the page. Runs that a user may not see do not exist for that user."""

    title: str

    def all(self, user: User) -> list[Listed]:
        """Return every run that this user may see, in the order of the list."""

    def one(self, user: User, name: str) -> Listed | None:
        """Return the run with this name; None if this user sees no such run."""

    def act(self, user: User, name: str, action: str) -> None:
        """Do the action of a button. ValueError if it is not possible, LookupError for an unknown run."""


class RunsSource:
    """The runs below a folder. Every signed-in user sees all of them; the owner can stop those on this machine."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir, self.title, self.lock = runs_dir, runs_dir.resolve().name, Lock()
        self.runs: list[Run] = []
        self.until = float("-inf")

    def all(self, user: User) -> list[Listed]:
        with self.lock:
            if (began := time.monotonic()) > self.until:
                self.runs = runs_below(self.runs_dir)
                ended = time.monotonic()
                self.until = ended + max(KEEP, (ended - began) / SHARE)
            return [self.listed(run, user) for run in self.runs]

    def one(self, user: User, name: str) -> Listed | None:
        run = one_run(self.runs_dir, name)
        return None if run is None else self.listed(run, user)

    def act(self, user: User, name: str, action: str) -> None:
        run = one_run(self.runs_dir, name)
        if run is None:
            raise LookupError(f"there is no run {name!r}")
        if action != "stop" or not user.is_owner:
            raise ValueError(f"{action} is not for {'this page' if user.is_owner else user.name}")
        stop(run)

    def listed(self, run: Run, user: User) -> Listed:
        """Return a run's list entry for a user."""
        can = {"stop": user.is_owner and run.can_stop, "export": has_adapter(run.path)}
        title = run.path.resolve().name if run.name == "." else run.name
        told = " \u00b7 ".join(filter(None, (so_far(run.path), run.where)))
        return Listed(run.name, title, run.state, (run.path, self.log_of(run.path)), told, run.written,
                      tuple(name for name in can if can[name]))

    def log_of(self, path: Path) -> Path:
        """Return the path of a run's log: in its folder, or beside the folder `run` of a server's job."""
        beside = path.parent / LOG
        return beside if path.name == "run" and path != self.runs_dir and beside.is_file() else path / LOG


def has_adapter(path: Path) -> bool:
    """Return whether a run has saved an adapter, or a checkpoint with one."""
    return (path / FINAL).is_dir() or any(path.glob("checkpoint-*"))


def zipped_adapter(run_dir: Path, name: str) -> FileResponse:
    """Return a run's adapter as a zip of the files that PEFT reads. ValueError or RuntimeError if it has none."""
    from lowmem_grpo.runs.saved_adapter import find_adapter  # imports torch, which would delay the first page

    adapter = find_adapter(run_dir, unfinished=True).folder
    if not adapter.resolve().is_relative_to(run_dir.resolve()):
        raise ValueError(f"the adapter of {name} lies outside of its folder, behind a link; it is not given away")
    title = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "run"
    with tempfile.NamedTemporaryFile(prefix="lowmem-grpo-", suffix=".zip", delete=False) as file:
        path = Path(file.name)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for each in sorted(adapter.iterdir()):
                if each.suffix in SAVED and not each.name.startswith(STATES):
                    add_file(archive, each, f"{title}/{each.name}")
    return FileResponse(path, filename=f"{title}-adapter.zip", media_type="application/zip",
                        background=BackgroundTask(path.unlink, missing_ok=True))


def add_file(archive: zipfile.ZipFile, path: Path, name: str) -> None:
    """Add a file to the archive in pieces. OSError for a symlink."""
    with open_plain(path) as source, archive.open(name, "w", force_zip64=True) as target:
        while piece := source.read(PIECE):
            target.write(piece)
