"""What a page can show and give away: the runs of a folder, or, in `jobs`, the jobs of a server."""

import re
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol

from starlette.background import BackgroundTask
from starlette.responses import FileResponse

from lowmem_grpo.runs.records import FINAL
from lowmem_grpo.server.page.plain_file import LOG, open_plain
from lowmem_grpo.server.page.runs_folder import WORDS, Run, one_run, runs_below, so_far, stop
from lowmem_grpo.server.users import User

KEEP = 1.0  # seconds for which the list of runs is taken as it was
SHARE = 0.1  # part of the time that may go into looking for runs, where there are very many
COLOURS = {"nothing": "waiting"}
SAVED = (".json", ".safetensors", ".txt", ".jinja", ".model", ".md")  # ends of names; states of an optimizer are not
STATES = ("optimizer", "scheduler", "rng", "trainer", "manifest")  # beginnings of names in a checkpoint
PIECE = 1024 * 1024  # bytes


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
