"""Time one GRPO step, generation included: ours against TRL's, with the same model, LoRA, prompts and rewards.

    python -m bench.loop.step_time                  makes TRL's environment (.venv-trl) if it does not exist

Both run in turn, each time in a fresh process, with micro-batches of 32 completions (LOG.md says why); bench/README.md
says how to read the rows.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console

from bench.common import child, options, tables
from bench.common.rows import RESULTS, in_turn, leave, machine, median_ratio, percentiles
from bench.loop.inputs import PACKAGE
from lowmem_grpo.models.stored_model import TINY, resolve
from lowmem_grpo.recipes.arithmetic import make_dataset
from lowmem_grpo.utils import MIB

BENCH = Path(__file__).resolve().parents[1]
OURS, TRL = "lowmem_grpo", "trl"
PROVIDERS = {OURS: "lowmem_grpo_transformers", TRL: "trl_transformers"}  # names in bench/loop/provider.py
WARM_UP = 2  # steps left out
LISTS = ("seconds", "cpu_seconds", "generate_seconds", "tokens")  # measures of each step
SHOWN: dict[str, tables.Figure] = {
    "provider": "provider", "loss": "loss_type", "s / step": ("p50", ".3f"), "TRL / ours": ("ratio", ".2f"),
    "in processor seconds": ("cpu_ratio", ".2f"), "tokens / s": ("tokens_per_second", ".0f"),
    "peak MiB": ("peak_bytes", ".0f", MIB)}
Run = dict[str, Any]
console = Console(width=110)


def run(provider: str, python: str, batch: int, steps: int, given: dict[str, Any]) -> Run:
    """Run a provider in a fresh process; return its measures, with an entry for each step after the warm-up."""
    asked = {"provider": PROVIDERS[provider], "folder": resolve(TINY), "steps": steps - WARM_UP, "warm_up": WARM_UP,
             "batch": batch, **{name: given[name] for name in ("problems", "loss_type", "device")}}
    found = child.call("bench.loop.provider:run", asked, provider == TRL, python=python,
                       settings={"OMP_NUM_THREADS": str(given["threads"])})
    if "missing" in found:
        raise click.ClickException(f"{found.get('log', '')}\n{provider}: {found['missing']}")
    timed = {name: [sum(step[name].values()) for step in found["steps"]] for name in ("seconds", "cpu_seconds")}
    generate = [step["seconds"]["generate"] for step in found["steps"]]
    return found | timed | {"generate_seconds": generate, "tokens": found["tokens"][WARM_UP:]}


def row(runs: dict[str, list[Run]], provider: str, where: dict[str, Any]) -> dict[str, Any]:
    """Return the row to record for one provider; the ratios are TRL's time divided by ours."""
    own = runs[provider]
    last, kept = own[-1], {name: [value for run in own for value in run[name]] for name in LISTS}
    return {
        "provider": provider, **where, "versions": last["versions"],
        "loss_type": last["config"]["loss_type"], **percentiles(kept["seconds"]),
        "cpu_seconds": percentiles(kept["cpu_seconds"]), "ratio": ratio(runs, "seconds"),
        "cpu_ratio": ratio(runs, "cpu_seconds"), "generate_seconds": percentiles(kept["generate_seconds"]),
        "tokens_per_step": median(kept["tokens"]),
        "tokens_per_second": round(sum(kept["tokens"]) / sum(kept["seconds"]), 1),
        "peak_bytes": int(median(run["peak_bytes"] for run in own)),
        "rounds": len(own), "warm_up": WARM_UP, "config": last["config"],
    }


def ratio(runs: dict[str, list[Run]], name: str) -> float:
    """Return TRL's time divided by ours: the median over rounds of the ratio within a round."""
    return round(median_ratio(*([median(run[name]) for run in runs[provider]] for provider in (TRL, OURS))), 3)


def trl_environment() -> str:
    """Return the interpreter of .venv-trl, made from requirements-trl.txt if it does not exist."""
    folder = BENCH.parent / ".venv-trl"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    child.made_once(folder, [sys.executable, "-m", "venv", folder],
                    [python, "-m", "pip", "install", "-q", "-r", BENCH / "loop" / "requirements-trl.txt"])
    return str(python)


@click.command()
@click.option("--steps", default=8, show_default=True, type=click.IntRange(min=WARM_UP + 2), help="Steps of one run.")
@click.option("--rounds", "count", default=3, show_default=True, type=click.IntRange(min=1), help="Runs of each.")
@click.option("--trl-python", help="Interpreter of an environment with TRL; .venv-trl is made where this is left out.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--threads", default=1, show_default=True, help="Threads of each process on the CPU.")
@click.option("--loss-type", "loss_types", multiple=True, default=("dr_grpo", "dapo"), show_default=True)
@click.option("--our-batch", default=32, show_default=True, help="Completions of our micro-batch.")
@click.option("--trl-batch", default=32, show_default=True, help="Completions of TRL's micro-batch.")
@options.AS_JSON
def main(
    steps: int, count: int, trl_python: str | None, device: str, threads: int, loss_types: tuple[str, ...],
    our_batch: int, trl_batch: int, as_json: bool,
) -> None:
    """Compare one GRPO step of ours and of TRL's."""
    console.stderr = as_json
    where = machine() | {"device": device, "threads": threads, "steps": steps}  # first: the commit that it began with
    python, batches = {OURS: sys.executable, TRL: trl_python or trl_environment()}, {OURS: our_batch, TRL: trl_batch}
    with tempfile.TemporaryDirectory() as folder:
        problems = Path(folder) / "problems.jsonl"
        rows = make_dataset("train", PACKAGE.prompts * steps)
        problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for loss_type in loss_types:
            runs: dict[str, list[Run]] = {OURS: [], TRL: []}
            given = {"problems": problems, "loss_type": loss_type, "device": device, "threads": threads}
            for provider, _ in in_turn(list(runs), count):  # the order is reversed from round to round
                runs[provider].append(run(provider, python[provider], batches[provider], steps, given))
                console.print(f"{loss_type}, {provider}: {median(runs[provider][-1]['seconds']):.2f} s")
            made = [row(runs, name, where) for name in runs]
            cells = ([tables.cell(one, figure) for figure in SHOWN.values()] for one in made)
            console.print(tables.terminal("one GRPO step of 256 completions", list(SHOWN), cells))
            for one in made:
                leave(one, RESULTS / "step_time.jsonl", as_json)


if __name__ == "__main__":
    main()
