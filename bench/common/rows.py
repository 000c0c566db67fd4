"""Benchmark rows, the machine and commit that made them, and files of results."""

import json
import os
import platform
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

T = TypeVar("T")
OWN = "lowmem-grpo"
RESULTS = Path(__file__).resolve().parents[1] / "results"  # a file of rows for each bench
PACKAGES = (OWN, "torch", "transformers", "peft")
COMMIT = Path(__file__).resolve().parents[2] / ".gpu-bundle" / "commit"  # for a copy of the tree without its history


def machine(packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """Return processor, cores, installed versions, commit and date; card and driver if there is a card."""
    import torch

    from lowmem_grpo.trainer.preflight.resources import cpu_model

    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "cpu": cpu_model(), "cores": os.cpu_count(), "gpu": card, **({"driver": driver()} if card else {}),
        "python": platform.python_version(), "versions": versions(packages), "commit": commit(),
        "date": date.today().isoformat(),
    }


def driver() -> str | None:
    """Return the version of the card's driver by nvidia-smi; None if that does not work."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode == 0:
            return done.stdout.splitlines()[0].strip()
    return None


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    return {name: found for name in packages if (found := version_of(name))}


def version_of(name: str) -> str | None:
    """Return a package's version, None if it is not installed; our own is then read from pyproject.toml."""
    with suppress(PackageNotFoundError):
        return version(name)
    if name != OWN:
        return None
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def commit() -> str:
    """Return the commit of the code, with "+changes" if the package differs from it. In a copy without its history it
    is the name that `make gpu-bundle` wrote."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=RESULTS, capture_output=True, text=True, check=False).stdout.strip()

    name = git("rev-parse", "--short=12", "HEAD") if shutil.which("git") else ""
    if not name:
        return COMMIT.read_text().strip() if COMMIT.exists() else "unknown"
    return name + ("+changes" if git("status", "--porcelain", "--", "../../lowmem_grpo") else "")


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Add one line to a results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def leave(row: dict[str, Any], path: Path, as_json: bool) -> None:
    """Print a row on standard output as a line of JSON, or append it to a results file."""
    if as_json:
        print(json.dumps(row), flush=True)
    else:
        append_row(path, row)


def run_now() -> str:
    """Return a name for a run: the time at which it begins."""
    return datetime.now().isoformat(timespec="seconds")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a results file; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def newest(rows: list[dict[str, Any]], *fields: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the last row of each combination of `fields`, in the order of their first rows."""
    return {tuple(json.dumps(row.get(name)) for name in fields): row for row in rows}


def percentiles(values: list[float]) -> dict[str, float]:
    """Return the 20th, 50th and 80th percentile."""
    cuts = quantiles(values * 2, n=10, method="inclusive") if len(values) < 2 else quantiles(values, n=10,
                                                                                             method="inclusive")
    return {"p20": round(cuts[1], 4), "p50": round(cuts[4], 4), "p80": round(cuts[7], 4)}


def in_turn(cases: Sequence[T], rounds: int, warm_up: int = 0) -> Iterator[tuple[T, bool]]:
    """Yield (case, whether it counts): every case once per round, in reversed order in every second round; the first
    `warm_up` rounds do not count."""
    for number in range(rounds + warm_up):
        for case in reversed(cases) if number % 2 else cases:
            yield case, number >= warm_up


def median_ratio(own: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over rounds of a case's seconds divided by those of the baseline."""
    return round(median(mine / theirs for mine, theirs in zip(own, base, strict=True)), 4)
