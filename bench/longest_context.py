"""The longest context whose training step fits a bounded card: what the planner says, then tried for real.

    python bench/longest_context.py --device cuda --gib 16                Llama-3.1-8B, random weights, 8 completions
    python bench/longest_context.py --shape qwen2.5-1.5b --gib 2          on fake tensors: no card needed

Each trial is the step of `bench/memory.py` with every feature on. The first has the planned length; then the length
grows where it fitted and shrinks where it did not, until both sides are known or the trials are used up. A row of each
trial goes to bench/results/longest_context.jsonl as soon as it is done.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from memory import measure_stage, weigh_stage
from memory_stages import CASES, Case
from rich.console import Console
from rich.table import Table
from rows import append_row, machine

RESULTS = Path(__file__).resolve().parent / "results" / "longest_context.jsonl"
STAGE = "+ 8-bit optimizer"
STEP = 128  # tokens; lengths are multiples of it, as the planner's are
GIB = 2**30
console = Console(width=120)
Trial = Callable[[int], dict[str, Any]]


def planned_context(case: Case, gib: float) -> int:
    """What the planner says of this model on a card of so many GiB; 0 where nothing fits."""
    from lowmem_grpo.cards import device
    from lowmem_grpo.memory_plan import RunSettings
    from lowmem_grpo.model_shape import named_config
    from lowmem_grpo.planner import max_context

    settings = RunSettings(STEP, case.generations, case.rank, engine="transformers", mlp_tile=4096, chunk_rows=1024,
                           optim="adamw_8bit", host_embedding=False)
    return max_context(named_config(case.shape), settings, device(f"{gib}GiB"))


def search(trial: Trial, start: int, most: int, step: float = 0.06) -> list[dict[str, Any]]:
    """Trials from `start` on, longer or shorter, until one fits and a longer one does not."""
    rows: list[dict[str, Any]] = []
    context = max(STEP, start)
    while len(rows) < most:
        rows.append(trial(context))
        fitting = [row for row in rows if row["fits"]]
        if len(fitting) < len(rows) and (fitting or context == STEP):
            break
        shorter = max(STEP, int((1 - step) * context // STEP * STEP))
        context = longer(fitting, step) if fitting else shorter
    return rows


def longer(fitting: list[dict[str, Any]], step: float) -> int:
    """By `step` from one length that fits; from two on, where their bytes on the device would reach the bound."""
    last = fitting[-1]
    next_up = int((1 + step) * last["context"] // STEP + 1) * STEP
    if len(fitting) == 1 or last["device_bytes"] <= fitting[-2]["device_bytes"]:
        return next_up
    per_token = (last["device_bytes"] - fitting[-2]["device_bytes"]) / (last["context"] - fitting[-2]["context"])
    room = last["gib"] * GIB - last["device_bytes"]
    return max(next_up, int((last["context"] + room / per_token) // STEP) * STEP)


def tried(case: Case, device: str, gib: float) -> dict[str, Any]:
    """One step of one length: whether it fits, and its bytes."""
    found = measure_stage(case, STAGE, gib) if device == "cuda" else weigh_stage(case, STAGE)
    fits = "device_bytes" in found and found["device_bytes"] <= gib * GIB
    return {"shape": case.shape, "context": case.context, "generations": case.generations, "rank": case.rank,
            "device": device, "gib": gib, "fits": fits, **found}


def show(rows: list[dict[str, Any]], planned: int) -> None:
    """The trials, and what the planner had said."""
    table = Table("context", "fits", "device GiB", "host GiB", "", title=f"planned: {planned:,} tokens")
    for row in rows:
        sizes = [f"{row[name] / GIB:.2f}" if name in row else "" for name in ("device_bytes", "host_bytes")]
        table.add_row(f"{row['context']:,}", "yes" if row["fits"] else "no", *sizes, str(row.get("error", ""))[:60])
    console.print(table)


@click.command()
@click.option("--shape", default="llama-3.1-8b", show_default=True, type=click.Choice(sorted({c.shape for c in CASES})))
@click.option("--device", type=click.Choice(["fake", "cuda"]), default="fake", show_default=True)
@click.option("--gib", type=float, required=True, help="What of the card may be used.")
@click.option("--generations", default=8, show_default=True, type=click.IntRange(min=2))
@click.option("--trials", default=5, show_default=True, type=click.IntRange(min=1), help="At most.")
@click.option("--start", type=click.IntRange(min=STEP), help="The first length; the planned one where left out.")
@click.option("--output", default=RESULTS, type=click.Path(dir_okay=False, path_type=Path), show_default=True)
def main(shape: str, device: str, gib: float, generations: int, trials: int, start: int | None, output: Path) -> None:
    """Find the longest context that fits; exit code 1 where none does."""
    common = machine() | {"run": datetime.now().isoformat(timespec="seconds")}  # first: the commit it began with
    case = Case(shape, 0, generations)
    planned = planned_context(case, gib)
    console.print(f"{shape} x {generations} in {gib:g} GiB: planned {planned:,} tokens")

    def trial(context: int) -> dict[str, Any]:
        row = tried(replace(case, context=context), device, gib) | {"planned_context": planned, **common}
        append_row(output, row)
        console.print(f"{context:,}: {'fits' if row['fits'] else row.get('error', 'does not fit')}", highlight=False)
        return row

    rows = search(trial, start or planned, trials)
    show(rows, planned)
    if not any(row["fits"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
