"""The runs in a folder, as a page shows them."""

import time
from pathlib import Path
from threading import Lock

from lowmem_grpo.runs.records import FINAL
from lowmem_grpo.service.users import User
from lowmem_grpo.views.dashboard.listed import Listed
from lowmem_grpo.views.dashboard.log_tail import LOG
from lowmem_grpo.views.dashboard.runs_folder import WORDS, Run, one_run, runs_below, stop

KEEP = 1.0  # seconds for which the list of runs is taken as it was
SHARE = 0.1  # of the time that may be spent with looking for runs, where there are very many
COLOURS = {"nothing": "waiting"}


class RunsSource:
    """Everybody who can sign in sees all runs; the owner can stop those of this machine."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir, self.title, self.lock = runs_dir, runs_dir.resolve().name, Lock()
        self.found: list[Run] = []
        self.until = float("-inf")

    def all(self, user: User) -> list[Listed]:
        with self.lock:
            if (began := time.monotonic()) > self.until:
                self.found = runs_below(self.runs_dir)
                ended = time.monotonic()
                self.until = ended + max(KEEP, (ended - began) / SHARE)
            return [listed(run, user) for run in self.found]

    def one(self, user: User, name: str) -> Listed | None:
        run = one_run(self.runs_dir, name)
        return None if run is None else listed(run, user)

    def act(self, user: User, name: str, action: str) -> str:
        run = one_run(self.runs_dir, name)
        if run is None:
            raise LookupError(f"there is no run {name!r}")
        if action != "stop" or not user.is_owner:
            raise ValueError(f"{action} is not for {'this page' if user.is_owner else user.name}")
        stop(run)
        return "told to stop: it finishes its step, and saves"

    def folder(self, user: User, name: str) -> tuple[Path, Path | None] | None:
        run = one_run(self.runs_dir, name)
        return None if run is None else (run.path, self.log_of(run.path))

    def log_of(self, path: Path) -> Path:
        """Where its output is, if somebody keeps it: in its folder, or beside the folder `run` of a server's job."""
        beside = path.parent / LOG
        return beside if path.name == "run" and path != self.runs_dir and beside.is_file() else path / LOG


def listed(run: Run, user: User) -> Listed:
    """A run with its buttons."""
    stops = ("stop",) if user.is_owner and run.can_stop else ()
    exports = ("export",) if has_adapter(run.path) else ()
    title = run.path.resolve().name if run.name == "." else run.name
    return Listed(run.name, title, COLOURS.get(run.state, run.state), WORDS[run.state], run.where, run.written,
                  stops + exports, run.state)


def has_adapter(path: Path) -> bool:
    """Whether a run has saved an adapter, or a checkpoint with one."""
    return (path / FINAL).is_dir() or any(path.glob("checkpoint-*"))
