"""Measure the memory of one training step, peaks on device and host, as features that save it are added one by one.

    python -m bench.memory.bench                  every case, on fake tensors: minutes on any machine, no GPU
    python -m bench.memory.bench --device cuda --gib 16  the same step for real, random weights, on a card made smaller
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from bench.common import options
from bench.common.rows import leave, machine, read_rows
from bench.memory.picture import draw
from bench.memory.section import newest_cases
from bench.memory.stages import CASES, STAGES, Case, completion_lengths
from lowmem_grpo.utils import GIB

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "memory.svg"
PLANNED = "+ 8-bit optimizer"  # the stage that the planner predicts


def planned(case: Case, budget: float | None) -> dict[str, int]:
    """Return what the planner predicts for the case, on a card of `budget` GiB or of 1 TiB."""
    from lowmem_grpo.memory.cards import device
    from lowmem_grpo.memory.model_shape import named_config
    from lowmem_grpo.memory.plan import RunSettings
    from lowmem_grpo.memory.planner import plan

    settings = RunSettings(
        case.context, case.generations, case.rank, max_tokens=case.context, mlp_tile=4096, chunk_rows=1024,
        optim="adamw_8bit", host_embedding=False, spread=0.0,  # one sequence of the longest length
    )
    found = plan(named_config(case.shape), settings, device(f"{budget or 1024}GiB"), case.shape)
    sizes = {"planned_bytes": found.train_allocated, "planned_train_bytes": found.train}
    return sizes | {"planned_host_bytes": found.host}


def bytes_of(case: Case, stage: str, device: str, gib: float | None) -> dict[str, Any]:
    """Return the bytes of a stage of a case: measured on a card with a limit of `gib`, else counted on fake tensors."""
    from bench.memory import on_card, weigh
    from lowmem_grpo.memory.model_shape import named_config

    config, lengths, begin = named_config(case.shape), completion_lengths(case), time.perf_counter()
    if device == "cuda":
        return on_card.measure(config, lengths, STAGES[stage], case.rank, gib)
    found = weigh.weigh(config, lengths, STAGES[stage], case.rank)
    sizes = {f"{name}_bytes": value for name, value in vars(found).items() if name != "breakdown"}
    return sizes | {"seconds": round(time.perf_counter() - begin, 2)}


def rows_of(case: Case, stages: list[str], device: str, gib: float | None) -> Iterator[dict[str, Any]]:
    """Yield a row of each stage."""
    for stage in stages:
        row = {**asdict(case), "stage": stage, "device": device, "gib": gib, **bytes_of(case, stage, device, gib),
               **(planned(case, gib) if stage == PLANNED else {})}
        said = row.get("error", "") if "device_bytes" not in row else (
            f"{row['device_bytes'] / GIB:.2f} GiB on the device, {row['host_bytes'] / GIB:.2f} on the host")
        click.echo(f"{case.shape} {case.context:,} x {case.generations}: {stage}: {said}", err=True)
        yield row


def cases(shapes: tuple[str, ...], context: int | None, generations: int | None) -> list[Case]:
    """Return the cases that were asked for, with `context` and `generations` in place of their own if set."""
    chosen = [case for case in CASES if not shapes or case.shape in shapes]
    changes = {name: value for name, value in (("context", context), ("generations", generations)) if value}
    return list(dict.fromkeys(replace(case, **changes) for case in chosen))


@click.command()
@click.option("--shape", "shapes", multiple=True, type=click.Choice(sorted({case.shape for case in CASES})),
              help="By default all.")
@click.option("--context", type=click.IntRange(min=64), help="Tokens of the longest sequence.")
@click.option("--generations", type=click.IntRange(min=2), help="Completions of a prompt.")
@click.option("--stage", "stages", multiple=True, type=click.Choice(list(STAGES)), help="By default all.")
@click.option("--device", type=click.Choice(["fake", "cuda"]), default="fake", show_default=True)
@click.option("--gib", type=float, help="On a card: the memory that may be used.")
@options.output("memory")
@options.AS_JSON
@click.option("--picture", is_flag=True, help="Only draw the newest rows of --output.")
def main(
    shapes: tuple[str, ...], context: int | None, generations: int | None, stages: tuple[str, ...], device: str,
    gib: float | None, output: Path, as_json: bool, picture: bool,
) -> None:
    """Measure the stages of each case and append a row of each; or draw them."""
    if picture:
        draw(newest_cases(read_rows(output)), PICTURE)
        click.echo(f"{PICTURE}")
        return
    common = machine()  # first, so that the commit is the one at the start of the run
    for case in cases(shapes, context, generations):
        for row in rows_of(case, list(stages or STAGES), device, gib):
            leave(row | common, output, as_json)


if __name__ == "__main__":
    main()
