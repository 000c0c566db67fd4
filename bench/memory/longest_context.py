"""Find the longest context whose training step fits a limited card: first planned, then tried.

    python -m bench.memory.longest_context --gib 16     Llama-3.1-8B, 8 completions; with --device cuda for real

Each trial is the step of `bench/memory/bench.py` with every feature on, without sampling. The first trial has the
planned length, and each further one is 6% longer after a fit and shorter after a failure, until the border is known,
the model's own longest context fits, or the trials are used up. Each trial leaves a row at once.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench.common import options, tables
from bench.common.rows import append_row, machine, run_now
from bench.memory.bench import PLANNED, bytes_of, planned
from bench.memory.stages import CASES, Case
from lowmem_grpo.utils import GIB

STEP = 128  # tokens; lengths are multiples of it, as the planner's are
CLOSE = 1.06  # from one trial's length to the next
FILLED = 0.93  # share of the limit that is planned for the first trial
SHOWN: dict[str, tables.Figure] = {
    "context": ("context", ","), "fits": "fits", "device GiB": ("device_bytes", ".2f", GIB),
    "host GiB": ("host_bytes", ".2f", GIB), "": "error"}
console = Console(width=120)
Trial = Callable[[int], dict[str, Any]]


def planned_context(case: Case, gib: float, longest: int) -> int:
    """Return the longest context whose training step takes at most FILLED of the bound, by the planner."""
    low, high = 1, longest // STEP
    while low < high:
        middle = (low + high + 1) // 2
        fits = planned(replace(case, context=middle * STEP), None)["planned_bytes"] <= FILLED * gib * GIB
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * STEP


def search(trial: Trial, start: int, most: int, longest: int) -> list[dict[str, Any]]:
    """Run trials from `start` on, a little longer after a fit and shorter after a failure, until the verdict turns, the
    model's longest fits, or STEP does not."""
    rows: list[dict[str, Any]] = []
    context, last = min(max(STEP, start), longest), 0
    while len(rows) < most and context != last and len({row["fits"] for row in rows}) < 2:
        rows.append(trial(context))
        last, steps = context, context // STEP
        steps = max(steps + 1, int(steps * CLOSE)) if rows[-1]["fits"] else min(steps - 1, ceil(steps / CLOSE))
        context = min(max(STEP, steps * STEP), longest)
    return rows


def tried(case: Case, device: str, gib: float) -> dict[str, Any]:
    """Try a step of one length; return whether it fits, and its bytes."""
    found = bytes_of(case, PLANNED, device, gib)
    fits = "device_bytes" in found and found["device_bytes"] <= gib * GIB
    return {"shape": case.shape, "context": case.context, "generations": case.generations, "rank": case.rank,
            "device": device, "gib": gib, "fits": fits, **found}


@click.command()
@click.option("--shape", default="llama-3.1-8b", show_default=True, type=click.Choice(sorted({c.shape for c in CASES})))
@click.option("--device", type=click.Choice(["fake", "cuda"]), default="fake", show_default=True)
@click.option("--gib", type=float, required=True, help="Memory of the card that may be used.")
@click.option("--generations", default=8, show_default=True, type=click.IntRange(min=2))
@click.option("--trials", default=5, show_default=True, type=click.IntRange(min=1), help="At most.")
@click.option("--start", type=click.IntRange(min=STEP), help="The first length; by default the planned one.")
@options.output("longest_context")
def main(shape: str, device: str, gib: float, generations: int, trials: int, start: int | None, output: Path) -> None:
    """Find the longest context that fits. The exit code is 1 if none does."""
    from lowmem_grpo.memory.model_shape import named_config

    common = machine() | {"run": run_now()}  # first: the commit it began with
    case = Case(shape, 0, generations)
    longest = named_config(shape)["max_position_embeddings"]
    first = planned_context(case, gib, longest)
    console.print(f"{shape} x {generations} in {gib:g} GiB: a step of {first:,} tokens is planned to fit")

    def trial(context: int) -> dict[str, Any]:
        row = tried(replace(case, context=context), device, gib) | {"planned_context": first, **common}
        append_row(output, row)
        console.print(f"{context:,}: {'fits' if row['fits'] else row.get('error', 'does not fit')}", highlight=False)
        return row

    rows = search(trial, start or first, trials, longest)
    tables.print_rows(rows, SHOWN, title=f"planned: {first:,} tokens")
    if not any(row["fits"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
