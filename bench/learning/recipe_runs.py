"""Run every recipe once, as a user would; a row for each records what it learned, its time and its memory.

    python -m bench.learning.recipe_runs                 # all, with the preset of this machine
    python -m bench.learning.recipe_runs --recipes arithmetic --seed 1 --output bench/results/demo.jsonl  # the demo

`python docs/make_recipes.py` makes docs/recipes.md of the rows. With `--must-rise` the exit code is also 1 if
accuracy on held-out problems does not rise by two standard errors.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click

from bench.common import options
from bench.common.rows import append_row, machine
from lowmem_grpo.recipes import RECIPES

CURVES = {  # of runs that have both of these metrics: their titles
    ("rewards/accuracies", "rewards/margins"): ("share of pairs in the right order", "margin of a pair"),
    ("rewards/number_match/mean", "critic/explained_variance"): ("share of right answers",
                                                                 "variance that the critic explains"),
}
ERRORS = 2.0  # accuracy must rise by this many standard errors of the difference
NEEDS = {"code": "isolation", "gsm8k": "dataset"}  # recipes that may fail, and what a machine lacks then
SUMMARY = ("accuracy_before", "accuracy_after", "accuracy_after_sft", "taught_format_before", "taught_format_after_sft",
           "taught_format_after", "pairs_in_order", "kinds", "eval_problems", "steps", "sft_steps", "seed",
           "train_seconds", "status", "model")


def run_recipe(name: str, folder: Path, words: list[str], time_limit: float) -> dict[str, Any]:
    """Run one recipe; return its row, in which `missing` says why it has no figures."""
    command = [sys.executable, "-m", "lowmem_grpo", "run", name, f"output_dir={folder}", "overwrite_output_dir=true",
               "disable_tqdm=true", *words]
    row: dict[str, Any] = {"recipe": name, "words": words}
    started = time.perf_counter()
    log = folder.parent / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        code, row["host_peak_bytes"] = waited(process, time_limit)
    row["command_seconds"] = time.perf_counter() - started
    if code == -signal.SIGKILL and row["command_seconds"] >= time_limit:
        return row | {"missing": f"not finished within {time_limit:.0f} s"}
    if code and name != "judge":  # the embedded model cannot judge, which is an error once all is written
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return row | {"missing": (lines or [f"exit status {code}"])[-1][:300]}
    return row | measured(folder)


def waited(process: subprocess.Popen[bytes], time_limit: float) -> tuple[int, int]:
    """Return exit status and peak resident bytes of a process, which is killed when time is over."""
    timer = threading.Timer(time_limit, process.kill)
    timer.start()
    _, status, usage = os.wait4(process.pid, 0)
    timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_maxrss * 1024


def measured(folder: Path) -> dict[str, Any]:
    """Return the figures in a finished run's files."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step_time" in line]  # the others are of evaluations
    taught = [line for line in steps if "distillation/divergence" in line]
    curves = [{title: [line[name] for line in steps] for name, title in zip(names, titles, strict=True)}
              for names, titles in CURVES.items() if steps and {*names} <= steps[0].keys()]
    return {
        **{name: summary[name] for name in SUMMARY if name in summary},
        **({"divergence": [line["distillation/divergence"] for line in taught],
            "entropy": [line["entropy"] for line in taught]} if taught else {}),
        **({"curves": curves[0]} if curves else {}),
        "rewards": [line.get("reward") for line in steps],  # None where a judge failed, for example
        "groups_with_signal": [line.get("groups/signal_share", 0.0) for line in steps],
        "repetition": [line.get("completions/repetition") for line in steps],
        "step_seconds": [line["step_time"] for line in steps],
        "peak_bytes": max((line.get("memory/peak_bytes") or 0 for line in steps), default=0),  # the card's, or resident
    }


@click.command(help=__doc__)
@click.option("--recipes", callback=options.names(RECIPES), help="Names, separated by commas; by default all.")
@click.option("--steps", type=int, help="GRPO steps of each, instead of the recipe's own.")
@click.option("--seed", type=int)
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs/recipes"), show_default=True)
@click.option("--option", "words", multiple=True, help="RECIPE:key=value for one recipe, key=value for all.")
@click.option("--time-limit", type=float, default=1800.0, show_default=True, help="Seconds for each recipe.")
@click.option("--must-rise", is_flag=True, help="Fail where accuracy does not rise.")
@options.output("recipe_runs")
def main(
    recipes: list[str], steps: int | None, seed: int | None, runs: Path, words: tuple[str, ...], time_limit: float,
    must_rise: bool, output: Path,
) -> None:
    here = machine()
    shared = [*([f"max_steps={steps}"] if steps else []), *([] if seed is None else [f"seed={seed}"])]
    failed = []
    for name in recipes or RECIPES:
        own = [word.removeprefix(f"{name}:") for word in words if ":" not in word.partition("=")[0]
               or word.startswith(f"{name}:")]
        row = run_recipe(name, runs / name, [*shared, *own], time_limit)
        if (must_rise and not rises(row)) or ("missing" in row and name not in NEEDS):
            failed.append(name)
        append_row(output, row | here)
        click.echo(told(row))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def rises(row: dict[str, Any]) -> bool:
    """Return whether accuracy rose beyond the noise of sampling."""
    if "missing" in row:
        return False
    before, after = row["accuracy_before"], row["accuracy_after"]
    noise = sum(share * (1 - share) / row["eval_problems"] for share in (before, after)) ** 0.5
    return bool(after - before > ERRORS * noise)


def told(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    if "missing" in row:
        return f"{row['recipe']}: missing: {row['missing']}"
    before, after = row.get("accuracy_before"), row.get("accuracy_after")
    change = "" if before is None or after is None else f"{before:.1%} -> {after:.1%}, "
    return f"{row['recipe']}: {change}{row['steps']} steps, {row['command_seconds']:.0f} s"


if __name__ == "__main__":
    main()
