"""`RunSource`: the runs that a page shows; `RunsSource`: those below a folder. (`JobsSource`: those of a job queue.)"""

import os
import re
import shutil
import signal
import socket
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from starlette.responses import StreamingResponse

from lowmem_grpo.runs.lock import FILE, OWNER_BYTES, boot, is_alive
from lowmem_grpo.runs.records import EARLIER, FINAL, METRICS, SUMMARY, json_object
from lowmem_grpo.server.page.run_follower import LOG, end_of, json_file, open_plain
from lowmem_grpo.server.users import User
from lowmem_grpo.utils import MIB, time_text

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


@dataclass(frozen=True)
class Listed:
    """A run's entry in the page's list, with the actions of its buttons."""

    name: str  # its name in the page's URL
    title: str
    state: str  # running, finished, failed and so on; also its colour
    paths: tuple[Path, Path]  # its folder and its log, which may not exist yet
    why: str = ""  # its progress, why it waits or ended, and its process
    written: float = 0.0  # seconds since 1970: time of submission or of the newest record; 0.0 is unknown
    actions: tuple[str, ...] = ()  # what this user can do with it: stop, resume, export
    can_show: bool = True  # whether it has begun to write


class RunSource(Protocol):
    title: str

    def all(self, user: User) -> list[Listed]:
        """Return every run that this user may see, in the order of the list."""

    def act(self, run: Listed, action: str) -> None:
        """Stop or resume a run. ValueError if that is not possible any more."""


class RunsSource:
    """The runs below a folder. Every signed-in user sees all of them; only the server's owner can stop one."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir, self.title, self.lock = runs_dir, runs_dir.resolve().name, Lock()
        self.runs: list[Listed] = []
        self.until = float("-inf")

    def all(self, user: User) -> list[Listed]:
        with self.lock:
            if (began := time.monotonic()) > self.until:
                self.runs = runs_below(self.runs_dir)
                ended = time.monotonic()
                self.until = ended + max(KEEP, (ended - began) / SHARE)
        return [run if user.is_owner else replace(run, actions=tuple({*run.actions} - {"stop"})) for run in self.runs]

    def act(self, run: Listed, action: str) -> None:
        lock = run.paths[0] / FILE
        if not holds_lock(lock, owner := owner_of(lock)):
            raise ValueError(f"{run.title} cannot be stopped any more: its process has ended")
        os.kill(int(owner["pid"]), signal.SIGTERM)


def runs_below(folder: Path) -> list[Listed]:
    """Return the newest `MOST_RUNS` runs in and below a folder: running ones first, then by time."""
    paths = sorted(islice(run_folders(folder), MOST_FOLDERS), key=newest, reverse=True)
    runs = [listed_run(path, folder) for path in paths[:MOST_RUNS]]
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
    return any(os.path.isfile(folder / name) for name in (METRICS, SUMMARY, FILE))


def listed_run(path: Path, folder: Path) -> Listed:
    """Return the run in `path`, named by its path below `folder`. A job's log lies beside the run's folder."""
    name, state, owner = path.relative_to(folder).as_posix(), state_of(path), owner_of(path / FILE)
    host = "" if owner.get("host") == socket.gethostname() else f" on {owner.get('host')}"
    where = f"process {owner.get('pid')}{host}" if state in ("running", "silent") else ""
    can = {"stop": state == "running" and holds_lock(path / FILE, owner), "export": has_adapter(path)}
    log = path.parent / LOG if path.name == "run" and path != folder else path / LOG
    return Listed(name, path.resolve().name if name == "." else name, state,
                  (path, log if log.is_file() else path / LOG), " \u00b7 ".join(filter(None, (so_far(path), where))),
                  newest(path), tuple(action for action in can if can[action]))


def state_of(path: Path) -> str:
    """Return "running" if the process in the run's lock file is alive, "silent" if the process is on another machine
    and the run wrote nothing for `SILENT` seconds. Otherwise return the ending in the run's summary, "killed" if there
    is none or the lock file was left behind, or "waiting" without records."""
    owner, status = owner_of(path / FILE), str(json_file(path / SUMMARY).get("status") or "")
    if owner and is_alive(owner):
        is_silent = owner.get("host") != socket.gethostname() and time.time() - newest(path) > SILENT
        return "silent" if is_silent else "running"
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
    """Return whether the kernel lists this process as the lock's holder; its pid alone may have been reused."""
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


def has_adapter(path: Path) -> bool:
    return (path / FINAL).is_dir() or any(path.glob("checkpoint-*"))


def zipped_adapter(run_dir: Path, name: str) -> StreamingResponse:
    """Return a run's adapter as a zip of the files that PEFT reads. ValueError or RuntimeError if it has none, OSError
    for a symlink among its files."""
    from lowmem_grpo.runs.saved_adapter import find_adapter  # imports torch, which would delay the first page

    adapter = find_adapter(run_dir, unfinished=True).folder
    if not adapter.resolve().is_relative_to(run_dir.resolve()):
        raise ValueError(f"the adapter of {name} lies outside of its folder, behind a link; it is not given away")
    title = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "run"
    file = tempfile.TemporaryFile(prefix="lowmem-grpo-")  # noqa: SIM115 - gone from the disk when it is closed
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for each in sorted(adapter.iterdir()):
            if each.suffix in SAVED and not each.name.startswith(STATES):
                with open_plain(each) as source, archive.open(f"{title}/{each.name}", "w", force_zip64=True) as target:
                    shutil.copyfileobj(source, target)
    file.seek(0)
    return StreamingResponse(iter(partial(file.read, MIB), b""), media_type="application/zip",
                             headers={"Content-Disposition": f'attachment; filename="{title}-adapter.zip"'})
