"""The process of a job: started, looked for, asked to stop. Another server may have started it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from lowmem_grpo.jobs import keeper
from lowmem_grpo.jobs.job import Job
from lowmem_grpo.jobs.keeper import ENDED, LOG, ORDER, STOP, write

FOLDER = "run"  # the run's folder in that of its job


def arguments_of(job: Job, folder: Path, recipes: Path | None) -> list[str]:
    """What `lowmem-grpo run` gets. `recipes` is the folder of recipe files that may be named, where there is one."""
    recipe = job.recipe if recipes is None or not job.recipe.endswith(".py") else str(recipes / job.recipe)
    own = [f"output_dir={folder / FOLDER}"]
    own += [f"card_share={job.share:g}"] if job.share < 1 else []
    own += ["resume=true"] if job.resume and (folder / FOLDER).is_dir() else []
    return [recipe, *job.options, *own]


def start(job: Job, folder: Path, recipes: Path | None = None) -> None:
    """Start one go of a job, in a session of its own that outlives this process."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (ENDED, STOP):
        (folder / old).unlink(missing_ok=True)
    write(folder / ORDER, {
        "command": [sys.executable, "-m", "lowmem_grpo", "run", *arguments_of(job, folder, recipes)],
        "time_limit": job.time_limit,
    })
    with open(folder / LOG, "ab") as log:
        subprocess.Popen([sys.executable, "-m", "lowmem_grpo.jobs.keeper", str(folder)], stdin=subprocess.DEVNULL,
                         stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def is_alive(folder: Path) -> bool:
    """Whether a keeper, or a run that lost its keeper, is at work in this folder."""
    return is_held(folder / keeper.KEEPER) or is_held(folder / keeper.RUN)


def is_held(path: Path) -> bool:
    """Whether a process holds this lock."""
    if not path.exists():
        return False
    try:
        os.close(keeper.held(path))
    except BlockingIOError:
        return True
    return False


def ended(folder: Path) -> dict[str, Any] | None:
    """How the last go ended: `code`, `why` it was stopped, `at`; None where nobody wrote that down."""
    return read(folder / ENDED)


def stop(folder: Path) -> None:
    """Ask for the end after the step. Asked of nobody, it has no effect."""
    (folder / STOP).touch()
    if not is_held(folder / keeper.KEEPER) and is_held(folder / keeper.RUN):  # a run that lost its keeper
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int((folder / keeper.RUN).read_text()), signal.SIGTERM)


def read(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is none yet."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None
