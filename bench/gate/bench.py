"""The GPU gate: everything that needs a card, as one command, in pieces of at most ten minutes.

    python -m bench.gate.bench                  on this machine's card: numbers first, then tests
    python -m bench.gate.bench --dry-run        every stage on the CPU, tiny shapes: no card needed
    python -m bench.gate.bench --call A --times when each piece would end, by the seconds that are known: nothing runs

Each piece runs in a separate process and has its own log. If a piece fails, or cannot run on this machine, the others
still run. The last page (gate.md) says what passed, which targets were missed, and what did not run.
"""

import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench.common.rows import append_row, commit, read_rows, run_now
from bench.gate import last_page
from bench.gate.pretend import is_pretend
from bench.gate.runner import CUT_OFF, FAILED, PASSED, Outcome, attempt
from bench.gate.stages import CARD, CPU, PRETEND, STAGES, Piece, Setup

BENCH = Path(__file__).resolve().parents[1]
RESULTS, RUNS = BENCH / "results", BENCH.parent / "runs"
DEVICE = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
console = Console(width=150)
# The order of pieces, by their names or the beginnings of their names. The first one is what most others depend on: an
# engine of vLLM that samples, sleeps and wakes. Measurements come next, long lists of tests last. Calls A, B and C are
# for a machine that is lent for ten minutes at a time: the step of a 3B model beside other trainers, then the 8B model.
# A piece that does not fit into the rest of a call is not begun, but shorter ones after it are.
ENGINE = "tests/smoke vllm"
SECONDS_OF_A_CALL = 560.0  # out of ten minutes; the rest is for unpacking and for bringing results back
CALLS: dict[str, tuple[str, ...]] = {
    "A": ("rivals/lowmem_grpo", "rivals/trl", "rivals/lowmem_grpo_16bit", "rivals/trl_nf4", "rivals/unsloth",
          "rivals/sampling"),
    "B": ("rollout/lowmem_grpo", "rollout/vllm_bf16_lora", "loop/lowmem_grpo", "kernels/nf4_linear", "profile/host",
          "profile/decode"),
    "C": ("peers/trl", "rollout/vllm_bnb_lora", "kernels/linear_logprobs", "memory/step-16", ENGINE,
          "tests/smoke 4-bit", "tests/vllm on_card", "tests/vllm", "tests/kernels", "tests"),
}
LARGEST = 4 * 2**20  # bytes of a file that --pack takes
# the stages that leave rows
NUMBERS = ("rivals", "kernels", "memory", "rollout", "loop", "switches", "profile", "learner", "peers")
TESTS = "tests"  # the stage that leaves none
DEFAULT = (
    ENGINE, "tests/smoke 4-bit", *(name for call in CALLS.values() for name in call if not name.startswith(TESTS)),
    *NUMBERS, TESTS,
)


def card_name() -> str:
    """Return the card's name, "" without a card. A separate process asks, so that this one holds no card memory."""
    done = subprocess.run([sys.executable, "-c", DEVICE], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def form_of(dry_run: bool) -> str:
    """Return the kind of run that this machine allows; click.UsageError without a card, unless it is a dry run."""
    if dry_run:
        return CPU
    name = card_name()
    if not name:
        raise click.UsageError("torch sees no card here; use --dry-run to walk every stage on the CPU")
    return PRETEND if is_pretend(name) else CARD


def asked_for(stages: str | None, call: str | None) -> tuple[str, ...]:
    """Return names of pieces, or their beginnings; click.UsageError for an unknown stage, or for both options."""
    if stages is not None and call is not None:
        raise click.UsageError("--call chooses the pieces itself; leave out --stages, or --call")
    if stages is None:
        return DEFAULT if call is None else CALLS[call]
    asked = tuple(name.strip() for name in stages.split(","))
    if wrong := [name for name in asked if name.partition("/")[0] not in STAGES]:
        raise click.UsageError(f"no stage {', '.join(wrong)}; choose from {', '.join(STAGES)}")
    return asked


def ordered(pieces: Iterable[Piece], asked: Iterable[str]) -> list[Piece]:
    """Return the pieces that were asked for, in that order, each once. The name of a piece means only that piece; any
    other name means all pieces whose names begin with it."""
    held = {piece.name: piece for piece in pieces}
    names = [name for wanted in asked
             for name in ([wanted] if wanted in held else [name for name in held if name.startswith(wanted)])]
    return [held[name] for name in dict.fromkeys(names)]


def times(pieces: Iterable[Piece], limit: float, lacks: Collection[str] = ()) -> dict[str, float | str]:
    """Return for each piece the second at which it has ended if each takes its `least`, or why it does not begin.
    `lacks` are packages that the machine has not."""
    now, found = 0.0, dict[str, float | str]()
    for piece in pieces:
        if missing := [need for need in piece.needs if need in lacks]:
            found[piece.name] = f"{missing[0]}: not installed"
        elif now + piece.least > limit:
            found[piece.name] = f"{limit - now:.0f} s are left, it takes about {piece.least}"
        else:
            found[piece.name] = now = now + piece.least
    return found


def pack(setup: Setup, file: Path) -> None:
    """Write an archive of state, logs, reports and rows, without weights and files of more than LARGEST bytes. Unpacked
    in the root of the repository, it lets the next call continue."""
    paths = {path for folder in (setup.out, setup.results) for path in folder.rglob("*") if path.is_file()}
    with tarfile.open(file, "w:gz") as archive:
        for path in sorted(paths):
            if setup.weights not in path.parents and path.stat().st_size <= LARGEST and path != file:
                archive.add(path, os.path.relpath(path, BENCH.parent))


def earlier(out: Path, form: str, code: str) -> list[dict[str, Any]]:
    """Return the outcomes of earlier calls on this commit; none if the code has uncommitted changes."""
    if "+changes" in code or code == "unknown":
        return []
    return [row for row in read_rows(out / "gate.jsonl") if (row["form"], row["commit"]) == (form, code)]


class Gate:
    """One call of the gate: the pieces that passed earlier, the time that is left, and the outcome of each piece."""

    def __init__(self, setup: Setup, limit: float, before: list[dict[str, Any]], code: str) -> None:
        self.setup, self.code, self.until = setup, code, time.monotonic() + limit
        self.done = {row["name"]: Outcome(**{name.name: row[name.name] for name in fields(Outcome)}) for row in before
                     if row["status"] == PASSED and row["name"] != "environment"}  # the machine may be another one
        self.outcomes: list[Outcome] = []

    def run(self, asked: tuple[str, ...]) -> None:
        """Run the environment's piece, then the pieces that were asked for, one after the other."""
        (first,) = STAGES["environment"](self.setup)
        self.settle(first)
        if self.outcomes[-1].status == PASSED:
            self.setup = replace(self.setup, facts=read_rows(self.setup.results / "environment.jsonl")[-1])
        for piece in ordered((piece for stage in STAGES.values() for piece in stage(self.setup)), asked):
            if piece.name != first.name:
                self.settle(piece)

    def settle(self, piece: Piece) -> None:
        """Take a piece's outcome from an earlier call, or run it."""
        self.outcomes.append(self.done.get(piece.name) or self.attempt(piece))
        last_page.write(self.setup, self.outcomes)  # at once, in case this process is killed

    def attempt(self, piece: Piece) -> Outcome:
        """Run a piece, print how it ended, and record it."""
        console.print(f"{piece.name} ...", style="dim")
        found = attempt(piece, self.setup, self.until - time.monotonic(), self.code)
        append_row(self.setup.out / "gate.jsonl", asdict(found))
        console.print(f"{piece.name}: {found.status} in {found.seconds:.0f} s {found.reason}",
                      highlight=False, markup=False)
        return found


@click.command()
@click.option("--call", type=click.Choice([*CALLS]), help="One of three calls of ten minutes each: the most valuable "
              "pieces, in order. A: beside other trainers. B and C: the 8B model.")
@click.option("--times", "only_times", is_flag=True, help="Run nothing; print when each piece would end on a "
              "card.")
@click.option("--lacks", multiple=True, help="With --times: a package that the card's machine lacks, such as unsloth.")
@click.option("--pack", "archive", type=click.Path(dir_okay=False, path_type=Path), help="Write logs, rows and state "
              "into this archive (.tgz) at the end.")
@click.option("--stages", help=f"Separated by commas: {', '.join(STAGES)}; or names of pieces or their beginnings, "
              "such as memory/step. They run in this order.")
@click.option("--time-limit", type=float, help="Seconds for this run; the next one continues; "
              f"{SECONDS_OF_A_CALL:g} with --call, else 7200.")
@click.option("--dry-run", is_flag=True, help="Run on the CPU with tiny shapes; rows stay in --output.")
@click.option("--again", is_flag=True, help="Also run what has passed on this commit.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Folder for logs, last page "
              "and state; runs/gpu-gate, or runs/gpu-gate-dry where nothing is measured.")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), help="Folder for rows; bench/results on a "
              "card, else a folder in --output.")
@click.option("--weights", type=click.Path(file_okay=False, path_type=Path), help="Folder where random weights are "
              "made once (16 GB on a card); by default in --output.")
def main(
    call: str | None, only_times: bool, lacks: tuple[str, ...], archive: Path | None, stages: str | None,
    time_limit: float | None, dry_run: bool, again: bool, output: Path | None, results: Path | None,
    weights: Path | None,
) -> None:
    """Run the stages, write rows and the last page. The exit code is 1 if a piece failed or was cut off."""
    asked = asked_for(stages, call)
    limit = time_limit if time_limit is not None else SECONDS_OF_A_CALL if call else 7200.0
    if only_times:
        card = Setup(CARD, *[Path("unused")] * 3, "")
        made = ordered((piece for stage in STAGES.values() for piece in stage(card)), ("environment", *asked))
        for name, end in times(made, limit, lacks).items():
            click.echo(f"{name}: ends at {end:.0f} s" if isinstance(end, float) else f"{name}: not begun, {end}")
        return
    form, code = form_of(dry_run), commit()
    out = (output or RUNS / ("gpu-gate" if form == CARD else "gpu-gate-dry")).resolve()
    rows = (results or (RESULTS if form == CARD else out / "results")).resolve()
    before = [] if again else earlier(out, form, code)
    run = before[-1]["run"] if before else run_now()
    out.mkdir(parents=True, exist_ok=True)
    gate = Gate(Setup(form, out, rows, (weights or out / "weights").resolve(), run), limit, before, code)
    gate.run(asked)
    if archive is not None:
        pack(gate.setup, archive.resolve())
    click.echo(f"\n{last_page.document(gate.setup, gate.outcomes)}\nlast page: {out / 'gate.md'}")
    if any(outcome.status in (FAILED, CUT_OFF) for outcome in gate.outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
