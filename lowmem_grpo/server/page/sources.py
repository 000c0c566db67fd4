"""What a page can show and give away: the runs below a folder, and what each is doing from the files that it wrote; or,
in `jobs`, the jobs of a server."""

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

DEPTH = 4  # folders below the watched one in which runs are looked for
MOST_FOLDERS, MOST_RUNS = 20_000, 500  # that are looked at, and that are shown
LAST_BYTES = 64 * 1024  # at the end of metrics.jsonl, in which the last line of a step is looked for
SILENT = 3600.0  # seconds after which a run of another machine that writes nothing is no longer taken for running
LOCKS = Path("/proc/locks")
WORDS = {state: state for state in ("running", "finished", "failed", "interrupted", "killed", "silent")} | {
    "nothing": "not begun"}
ENDED = ("finished", "failed", "interrupted")  # as a summary says it
KEEP = 1.0  # seconds for which the list of runs is taken as it was
SHARE = 0.1  # part of the time that may go into looking for runs, where there are very many
COLOURS = {"nothing": "waiting"}
SAVED = (".json", ".safetensors", ".txt", ".jinja", ".model", ".md")  # ends of names; states of an optimizer are not
STATES = ("optimizer", "scheduler", "rng", "trainer", "manifest")  # beginnings of names in a checkpoint
PIECE = 1024 * 1024  # bytes


@dataclass(frozen=True)
class Run:
    """The folder of a run: its name below the watched folder, its state of `WORDS`, and who writes into it."""

    name: str
    path: Path
    state: str
    owner: dict[str, Any]
    written: float  # seconds since 1970: when its newest record was

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
    """The runs in a folder and below it, those that run first, then the newest; the newest `MOST_RUNS` at most."""
    paths = sorted(islice(run_folders(folder), MOST_FOLDERS), key=newest, reverse=True)
    runs = [run_of(path, folder) for path in paths[:MOST_RUNS]]
    return sorted(runs, key=lambda run: (run.state != "running", -run.written))


def run_folders(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Each folder that holds records of a run, or that a run has taken."""
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
    """Return whether a folder holds what a run writes. One that cannot be read does not."""
    return any(os.path.isfile(folder / name) for name in (METRICS, SUMMARY, FILE))


def one_run(folder: Path, name: str) -> Run | None:
    """The run with this name, if it lies below the folder: a name never leads out of it."""
    path = folder if name == "." else folder / name
    try:
        inside = path.resolve().is_relative_to(folder.resolve()) and ".." not in path.relative_to(folder).parts
        return run_of(path, folder) if inside and is_run(path) else None
    except (OSError, ValueError):  # a name with a null byte, one that is too long, or one from the root
        return None


def run_of(path: Path, folder: Path) -> Run:
    """Return the run in `path`, named by its place below `folder`."""
    owner, written = owner_of(path / FILE), newest(path)
    state = state_of(path, json_file(path / SUMMARY), owner, time.time() - written)
    return Run(path.relative_to(folder).as_posix(), path, state, owner, written)


def state_of(path: Path, summary: dict[str, Any], owner: dict[str, Any], age: float) -> str:
    """A run whose process lives is running; of another machine's process nobody knows, so it is silent when it has
    written nothing for long. Otherwise the summary says how it ended; if that says nothing, or a later go on it left
    its lock behind, it was killed."""
    if owner and is_alive(owner):
        return "silent" if owner.get("host") != socket.gethostname() and age > SILENT else "running"
    status = str(summary.get("status") or "")
    if status in ENDED and not owner:
        return status
    return "killed" if owner or (path / METRICS).is_file() else "nothing"


def owner_of(path: Path) -> dict[str, Any]:
    """Who the lock's file names; empty where there is none."""
    try:
        return json_object(end_of(path, OWNER_BYTES))
    except ValueError:
        return {}


def newest(path: Path) -> float:
    """Return when a run wrote last, in seconds since 1970; 0.0 where it has written nothing."""
    times = [0.0]
    for name in (METRICS, SUMMARY, FILE):
        with suppress(OSError):
            times.append((path / name).lstat().st_mtime)
    return max(times)


def holds_lock(path: Path, owner: dict[str, Any]) -> bool:
    """Return whether the named process holds the lock, as the system lists it: a number may be another one's by now."""
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
    """Return a run's last step, its reward (or loss) and time there, in words; empty before its first step."""
    for line in reversed(end_of(path / METRICS, LAST_BYTES).splitlines()):
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            row = json_object(line)
            measured = next((f"{name} {row[name]:.3g}" for name in ("reward", "loss") if row.get(name) is not None), "")
            return " \u00b7 ".join(filter(None, (f"step {int(row['step']):,}", measured, time_text(row["elapsed"]))))
    return ""


def stop(run: Run) -> None:
    """Tell a run to end after its step and save, as Ctrl-C does. ValueError where it cannot be told."""
    if not run.can_stop:
        why = f"{run.where} is not one of this machine that holds it" if run.where else f"it is {WORDS[run.state]}"
        raise ValueError(f"{run.name} cannot be stopped from here: {why}")
    os.kill(int(run.owner["pid"]), signal.SIGTERM)


@dataclass(frozen=True)
class Listed:
    """A run's entry in the list, and the state of its buttons."""

    name: str  # by which an address names it
    title: str
    state: str  # the class of its colour: running, finished, failed and so on
    words: str  # its state in a word
    why: str = ""  # how far it is, why it waits or has ended, and which process writes it
    written: float = 0.0  # seconds since 1970: when it came, or its newest record was written; 0.0 is unknown
    actions: tuple[str, ...] = ()  # what can be done with it: stop, resume, export
    run_state: str = ""  # what is known of the run beside what its summary says: running, killed, silent
    can_show: bool = True  # whether it has begun to write


class RunSource(Protocol):
    """Finds runs for a user. What is another user's is not there."""

    title: str

    def all(self, user: User) -> list[Listed]:
        """Return every run that this user may see, in the order of the list."""

    def one(self, user: User, name: str) -> Listed | None:
        """Return the run with this name; None where there is none that this user may see."""

    def act(self, user: User, name: str, action: str) -> None:
        """Do what a button says. ValueError where it cannot be done, LookupError for a run that is not there."""

    def folder(self, user: User, name: str) -> tuple[Path, Path | None] | None:
        """Return where the files of a run are, and its log; None where there is no run, or where it has not begun."""


class RunsSource:
    """Everybody who can sign in sees all runs; the owner can stop those of this machine."""

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
            return [listed(run, user) for run in self.runs]

    def one(self, user: User, name: str) -> Listed | None:
        run = one_run(self.runs_dir, name)
        return None if run is None else listed(run, user)

    def act(self, user: User, name: str, action: str) -> None:
        run = one_run(self.runs_dir, name)
        if run is None:
            raise LookupError(f"there is no run {name!r}")
        if action != "stop" or not user.is_owner:
            raise ValueError(f"{action} is not for {'this page' if user.is_owner else user.name}")
        stop(run)

    def folder(self, user: User, name: str) -> tuple[Path, Path | None] | None:
        run = one_run(self.runs_dir, name)
        return None if run is None else (run.path, self.log_of(run.path))

    def log_of(self, path: Path) -> Path:
        """Return where its output is kept: in its folder, or beside the folder `run` of a server's job."""
        beside = path.parent / LOG
        return beside if path.name == "run" and path != self.runs_dir and beside.is_file() else path / LOG


def listed(run: Run, user: User) -> Listed:
    """Return a run as the list shows it to a user."""
    stops = ("stop",) if user.is_owner and run.can_stop else ()
    exports = ("export",) if has_adapter(run.path) else ()
    title = run.path.resolve().name if run.name == "." else run.name
    told = " \u00b7 ".join(filter(None, (so_far(run.path), run.where)))
    return Listed(run.name, title, COLOURS.get(run.state, run.state), WORDS[run.state], told, run.written,
                  stops + exports, run.state)


def has_adapter(path: Path) -> bool:
    """Return whether a run has saved an adapter, or a checkpoint with one."""
    return (path / FINAL).is_dir() or any(path.glob("checkpoint-*"))


def zipped_adapter(run_dir: Path, name: str) -> FileResponse:
    """Return a run's adapter as a zip with what PEFT reads. ValueError or RuntimeError says why it has none."""
    from lowmem_grpo.runs.saved_adapter import find_adapter  # which needs torch: a page is there at once without it

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
    """Copy a file piece by piece. OSError for a link."""
    with open_plain(path) as source, archive.open(name, "w", force_zip64=True) as target:
        while piece := source.read(PIECE):
            target.write(piece)
