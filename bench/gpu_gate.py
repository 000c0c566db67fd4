"""The GPU gate: everything that needs a card, as one command, in pieces of at most ten minutes.

    python bench/gpu_gate.py                                on the card of this machine, all stages, most valuable first
    python bench/gpu_gate.py --stages memory,rollout        some of them
    python bench/gpu_gate.py --time-limit 560               as much as fits; the same command again goes on
    python bench/gpu_gate.py --dry-run                      every stage on the CPU, tiny shapes: no card needed

Each piece is a process of its own with a log; rows are written as they are measured; a piece that fails, or that this
machine cannot run, never hides the others. The last page (gate.md) says what passed, what fell short of which target,
and what did not run. What has passed on this commit is not run again unless --again says so.
"""

import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from gate import last_page
from gate.runner import CUT_OFF, FAILED, PASSED, Outcome, attempt
from gate.stages import ASKED_FOR, CARD, CPU, PRETEND, STAGES, Setup
from pretend import is_pretend
from rich.console import Console
from rows import append_row, commit, read_rows

BENCH = Path(__file__).resolve().parent
RESULTS, RUNS = BENCH / "results", BENCH.parent / "runs"
DEVICE = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
console = Console(width=150)


def card_name() -> str:
    """The card's name, asked for in a process of its own, so that this one holds nothing of it; "" where there is
    none."""
    done = subprocess.run([sys.executable, "-c", DEVICE], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def form_of(dry_run: bool) -> str:
    """What kind of run this machine allows; click.UsageError where there is no card."""
    if dry_run:
        return CPU
    name = card_name()
    if not name:
        raise click.UsageError("torch sees no card here; --dry-run walks every stage on the CPU")
    return PRETEND if is_pretend(name) else CARD


def asked_for(value: str | None, profile: bool) -> list[str]:
    """The stages, or beginnings of names of pieces; click.BadParameter for one of no stage."""
    if value is None:
        return [name for name in STAGES if profile or name not in ASKED_FOR]
    asked = [name.strip() for name in value.split(",")] + [*ASKED_FOR] * profile
    if wrong := [name for name in asked if name.partition("/")[0] not in STAGES]:
        raise click.BadParameter(f"no stage {', '.join(wrong)}; choose from {', '.join(STAGES)}")
    return asked


def earlier(out: Path, form: str, code: str) -> list[dict[str, Any]]:
    """What an earlier call on this commit left; nothing where the code has uncommitted changes."""
    if "+changes" in code or code == "unknown":
        return []
    return [row for row in read_rows(out / "gate.jsonl") if (row["form"], row["commit"]) == (form, code)]


class Gate:
    """One call: what is done already, what time is left, how each piece ended."""

    def __init__(self, setup: Setup, limit: float, before: list[dict[str, Any]], code: str) -> None:
        self.setup, self.code, self.until = setup, code, time.monotonic() + limit
        self.done = {row["name"]: Outcome(**row) for row in before
                     if row["status"] == PASSED and row["name"] != "environment"}  # the machine may be another one
        self.outcomes: list[Outcome] = []

    def stage(self, name: str, asked: list[str]) -> None:
        """The pieces of a stage that were asked for, one after the other."""
        for piece in STAGES[name](self.setup):
            if name not in asked and not piece.name.startswith(tuple(asked)):
                continue
            found = self.done.get(piece.name)
            if found is None:
                console.print(f"{piece.name} ...", style="dim")
                found = attempt(piece, self.setup, self.until - time.monotonic(), self.code)
                append_row(self.setup.out / "gate.jsonl", found.row())
                console.print(f"{piece.name}: {found.status} in {found.seconds:.0f} s {found.reason}",
                              highlight=False, markup=False)
            self.outcomes.append(found)
            last_page.write(self.setup, self.outcomes)  # now, in case this process is stopped from outside

    def look(self) -> None:
        """The environment's stage, and what it found."""
        self.stage("environment", ["environment"])
        if self.outcomes[-1].status == PASSED:
            self.setup = replace(self.setup, facts=read_rows(self.setup.results / "environment.jsonl")[-1])


@click.command()
@click.option("--stages", help=f"With commas between them, of {', '.join(STAGES)}; or beginnings of names of pieces, "
              "such as memory/step.")
@click.option("--time-limit", default=7200.0, show_default=True, help="Seconds for this call; the next one goes on.")
@click.option("--dry-run", is_flag=True, help="On the CPU with tiny shapes; rows stay in --output.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True,
              help="cpu is the same as --dry-run.")
@click.option("--profile", is_flag=True, help="Profiles of a training and of a decoding step too.")
@click.option("--again", is_flag=True, help="Run what has passed on this commit as well.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Logs, last page and state; "
              "runs/gpu-gate, or runs/gpu-gate-dry where nothing is measured.")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), help="Rows; bench/results from a card, "
              "else a folder in --output.")
@click.option("--weights", type=click.Path(file_okay=False, path_type=Path), help="Random weights are made here once "
              "(16 GB on a card); in --output where left out.")
def main(
    stages: str | None, time_limit: float, dry_run: bool, device: str, profile: bool, again: bool, output: Path | None,
    results: Path | None, weights: Path | None,
) -> None:
    """Run the stages, write rows and the last page; exit code 1 where a piece failed or was cut off."""
    asked, form, code = asked_for(stages, profile), form_of(dry_run or device == "cpu"), commit()
    out = (output or RUNS / ("gpu-gate" if form == CARD else "gpu-gate-dry")).resolve()
    rows = (results or (RESULTS if form == CARD else out / "results")).resolve()
    before = [] if again else earlier(out, form, code)
    run = before[-1]["run"] if before else datetime.now().isoformat(timespec="seconds")
    out.mkdir(parents=True, exist_ok=True)
    gate = Gate(Setup(form, out, rows, (weights or out / "weights").resolve(), run), time_limit, before, code)
    gate.look()
    for name in STAGES:
        if name != "environment":
            gate.stage(name, asked)
    last_page.show(gate.setup, gate.outcomes, console)
    console.print(f"last page: {last_page.write(gate.setup, gate.outcomes)}", soft_wrap=True)
    if any(outcome.status in (FAILED, CUT_OFF) for outcome in gate.outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
