"""The runs below a folder, and what each is doing, from the files that it wrote."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lowmem_grpo.runs.lock import FILE, OWNER_BYTES, boot, is_alive
from lowmem_grpo.runs.records import EARLIER, METRICS, SUMMARY, json_object
from lowmem_grpo.server.page.plain_file import end_of, json_file
from lowmem_grpo.utils import time_text

DEPTH = 4  # folders below the watched one in which runs are looked for
MOST_FOLDERS, MOST_RUNS = 20_000, 500  # that are looked at, and that are shown
LAST_BYTES = 64 * 1024  # at the end of metrics.jsonl, in which the last line of a step is looked for
SILENT = 3600.0  # seconds after which a run of another machine that writes nothing is no longer taken for running
LOCKS = Path("/proc/locks")
WORDS = {state: state for state in ("running", "finished", "failed", "interrupted", "killed", "silent")} | {
    "nothing": "not begun"}
ENDED = ("finished", "failed", "interrupted")  # as a summary says it


@dataclass(frozen=True)
class Run:
    """The folder of a run: its name below the watched folder, its state of `WORDS`, and who writes into it."""

    name: str
    path: Path
    state: str
    summary: dict[str, Any]
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
    summary, owner, written = json_file(path / SUMMARY), owner_of(path / FILE), newest(path)
    name = path.relative_to(folder).as_posix()
    return Run(name, path, state_of(path, summary, owner, time.time() - written), summary, owner, written)


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
