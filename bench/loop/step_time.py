"""One GRPO step, generation included: ours against TRL's, same model, LoRA, prompts and rewards.

    python -m bench.loop.step_time                  makes TRL's environment (.venv-trl) where it is not there yet
    python -m bench.loop.step_time --trl-python PATH  uses the environment of that interpreter

Each provider first tries several micro-batch shapes and keeps its fastest. Then both run in turn, each time in a fresh
process. bench/README.md says how to read the rows.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console

from bench.common import child, options, rounds, tables
from bench.common.rows import RESULTS, leave, machine, percentiles
from lowmem_grpo.models.named import TINY, resolve
from lowmem_grpo.recipes.arithmetic import make_dataset
from lowmem_grpo.units import MIB

BENCH = Path(__file__).resolve().parents[1]
OURS, TRL = "lowmem_grpo", "trl"
PROVIDERS = {OURS: "lowmem_grpo_transformers", TRL: "trl_transformers"}  # of bench/loop/provider.py
SHAPES = (256, 128, 64, 32)  # completions of a micro-batch that each provider tries
WARM_UP, TRIAL_STEPS = 2, 4  # steps left out, and steps of a trial (those left out among them)
TIE = 1.03  # times within this factor count as equal
PROMPTS_PER_STEP, COMPLETIONS_PER_STEP = 32, 256
console = Console(width=110)


@dataclass(frozen=True)
class Plan:
    """What all runs of one call have in common."""

    python: dict[str, str]  # interpreter of each provider
    prompts: Path
    steps: int
    device: str
    threads: int

    @property
    def clock(self) -> str:
        """What shapes are chosen by: processor seconds on the CPU (steadier on a busy machine), seconds on a card."""
        return "cpu_seconds" if self.device == "cpu" else "seconds"

    def run(self, provider: str, batch: int, loss_type: str, steps: int) -> dict[str, Any]:
        """Return the measures of a fresh process; the lists have an entry for each step but the first ones."""
        words = child.words(folder=resolve(TINY), problems=self.prompts, steps=steps - WARM_UP, warm_up=WARM_UP,
                            batch=batch, loss_type=loss_type, device=self.device)
        found = child.run("bench.loop.provider", PROVIDERS[provider], *words, python=self.python[provider],
                          settings={"OMP_NUM_THREADS": str(self.threads)})
        if "missing" in found:
            raise click.ClickException(f"{found.get('log', '')}\n{provider}: {found['missing']}")
        timed = {name: [sum(step[name].values()) for step in found["steps"]] for name in ("seconds", "cpu_seconds")}
        generate = [step["seconds"]["generate"] for step in found["steps"]]
        return found | timed | {"generate_seconds": generate, "tokens": found["tokens"][WARM_UP:]}


@dataclass
class Measured:
    """The runs of one provider with its chosen shape."""

    batch: int
    tried: dict[int, dict[str, float]] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def kept(self, name: str) -> list[float]:
        """Return a measure of each step, over all rounds."""
        return [value for run in self.runs for value in run[name]]

    def tokens_per_second(self) -> float:
        return sum(self.kept("tokens")) / sum(self.kept("seconds"))

    def peak(self) -> float:
        return median(run["peak_bytes"] for run in self.runs)


def choose_shape(plan: Plan, provider: str, loss_type: str) -> Measured:
    """Try each shape twice, in opposite orders; of those as fast as the fastest, keep the one of least memory."""
    tried: dict[int, dict[str, float]] = {}
    for shape in (*SHAPES, *reversed(SHAPES)):
        run = plan.run(provider, shape, loss_type, TRIAL_STEPS)
        seconds = median(run[plan.clock])
        if shape not in tried or seconds < tried[shape][plan.clock]:
            tried[shape] = {plan.clock: round(seconds, 4), "peak_bytes": run["peak_bytes"]}
        peak = run["peak_bytes"] / MIB
        console.print(f"{provider}: {shape} completions a micro-batch: {seconds:.2f} s, {peak:.0f} MiB")
    fastest = min(trial[plan.clock] for trial in tried.values())
    ties = [shape for shape, trial in tried.items() if trial[plan.clock] <= TIE * fastest]
    return Measured(min(ties, key=lambda shape: tried[shape]["peak_bytes"]), tried)


def compare(plan: Plan, measured: dict[str, Measured], loss_type: str, count: int) -> None:
    """Both providers in turn, the order reversed from round to round."""
    for provider, _ in rounds.in_turn(list(measured), count):
        run = plan.run(provider, measured[provider].batch, loss_type, plan.steps)
        measured[provider].runs.append(run)
        console.print(f"{loss_type}, {provider}: {median(run['seconds']):.2f} s")


def ratio(measured: dict[str, Measured], name: str) -> float:
    """How many times as long TRL takes: the median over rounds of the ratio within a round."""
    pairs = zip(measured[TRL].runs, measured[OURS].runs, strict=True)
    return median(median(theirs[name]) / median(ours[name]) for theirs, ours in pairs)


def show(measured: dict[str, Measured], loss_type: str) -> None:
    """The comparison as a table."""
    columns = ("provider", "micro-batch", "s / step", "cpu s / step", "of it generation", "tokens / s", "peak MiB")
    rows = [[provider, str(own.batch), *(f"{median(own.kept(name)):.3f}" for name in
                                         ("seconds", "cpu_seconds", "generate_seconds")),
             f"{own.tokens_per_second():.0f}", f"{own.peak() / MIB:.0f}"] for provider, own in measured.items()]
    ours, theirs = measured[OURS], measured[TRL]
    speed, memory = ours.tokens_per_second() / theirs.tokens_per_second(), theirs.peak() / ours.peak()
    rows.append(["ratio", "", f"{ratio(measured, 'seconds'):.2f}x", f"{ratio(measured, 'cpu_seconds'):.2f}x", "",
                 f"{speed:.2f}x", f"{memory:.2f}x"])
    console.print(tables.terminal(f"one GRPO step of 256 completions, {loss_type}", columns, rows))


def row(plan: Plan, measured: dict[str, Measured], provider: str, where: dict[str, Any]) -> dict[str, Any]:
    """What is recorded of one provider; the ratios say how many times as long TRL took."""
    own = measured[provider]
    last = own.runs[-1]
    return {
        "provider": provider, **where, "versions": last["versions"], "device": plan.device,
        "threads": plan.threads, "loss_type": last["config"]["loss_type"], **percentiles(own.kept("seconds")),
        "cpu_seconds": percentiles(own.kept("cpu_seconds")), "ratio": round(ratio(measured, "seconds"), 3),
        "cpu_ratio": round(ratio(measured, "cpu_seconds"), 3),
        "generate_seconds": percentiles(own.kept("generate_seconds")), "tokens_per_step": median(own.kept("tokens")),
        "tokens_per_second": round(own.tokens_per_second(), 1),
        "mean_completion_length": round(sum(own.kept("tokens")) / len(own.kept("tokens")) / COMPLETIONS_PER_STEP, 2),
        "peak_bytes": int(own.peak()), "loaded_bytes": int(median(run["loaded_bytes"] for run in own.runs)),
        "rounds": len(own.runs), "steps": plan.steps, "warm_up": WARM_UP, "config": last["config"],
        "tried_micro_batches": own.tried,
    }


def trl_environment() -> str:
    """The interpreter of .venv-trl, made from requirements-trl.txt where it is not there yet."""
    folder = BENCH.parent / ".venv-trl"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    marker = folder / "installed"
    if not marker.exists():
        wanted = BENCH / "loop" / "requirements-trl.txt"
        for command in ([sys.executable, "-m", "venv", folder], [python, "-m", "pip", "install", "-q", "-r", wanted]):
            subprocess.run(command, check=True, stdout=sys.stderr)  # standard output is for rows
        marker.touch()
    return str(python)


@click.command()
@click.option("--steps", default=8, show_default=True, type=click.IntRange(min=WARM_UP + 2), help="Steps of one run.")
@click.option("--rounds", "count", default=3, show_default=True, type=click.IntRange(min=1), help="Runs of each.")
@click.option("--trl-python", help="Interpreter of an environment with TRL; .venv-trl is made where this is left out.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--threads", default=1, show_default=True, help="Threads of each process on the CPU.")
@click.option("--loss-type", "loss_types", multiple=True, default=("dr_grpo", "dapo"), show_default=True)
@click.option("--our-batch", type=int, help="Completions of our micro-batch; left out, several are tried.")
@click.option("--trl-batch", type=int, help="Completions of TRL's micro-batch; left out, several are tried.")
@options.AS_JSON
def main(
    steps: int, count: int, trl_python: str | None, device: str, threads: int, loss_types: tuple[str, ...],
    our_batch: int | None, trl_batch: int | None, as_json: bool,
) -> None:
    """Compare one GRPO step of ours and of TRL's."""
    console.stderr = as_json
    where = machine()  # taken first: the commit is the one that the run began with
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        rows = make_dataset("train", PROMPTS_PER_STEP * max(steps, TRIAL_STEPS))
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        plan = Plan({OURS: sys.executable, TRL: trl_python or trl_environment()}, prompts, steps, device, threads)
        given = {OURS: our_batch, TRL: trl_batch}
        chosen = {name: Measured(batch) if batch else choose_shape(plan, name, loss_types[0])
                  for name, batch in given.items()}
        for loss_type in loss_types:
            measured = {name: Measured(own.batch, own.tried) for name, own in chosen.items()}
            compare(plan, measured, loss_type, count)
            show(measured, loss_type)
            for name in measured:
                leave(row(plan, measured, name, where), RESULTS / "step_time.jsonl", as_json)


if __name__ == "__main__":
    main()
