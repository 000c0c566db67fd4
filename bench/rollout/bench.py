"""Rollouts by our engines and by vLLM with weights of its own: speed, memory, and agreement with the trainer.

    python -m bench.rollout.bench                   the 8B shape on the card if there is one, else a tiny one
    python -m bench.rollout.bench --device cpu      a tiny one on the CPU, within two minutes
    python -m bench.rollout.bench --targets         no measuring: which targets the recorded rows meet

First a model with random weights and an adapter are written to a folder. Each provider then samples from them in a
process of its own. What is not installed is named and left out. Rows go to bench/results/rollout.jsonl; bench/README.md
explains them.
"""

import json
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.common import child
from bench.common.model_folder import model_folder
from bench.common.rows import append_row, machine, percentiles, read_rows
from bench.common.targets import OURS, judged
from bench.common.targets import table as target_table
from bench.rollout.goals import BF16, BNB, EAGER, GOALS
from bench.rollout.shapes import SHAPES
from lowmem_grpo.units import MIB

BENCH = Path(__file__).resolve().parents[1]
RESULTS = BENCH / "results" / "rollout.jsonl"
PROVIDERS = (OURS, EAGER, BNB, BF16, "transformers")
PACKAGES = ("lowmem-grpo", "torch", "triton", "transformers")
console = Console(width=130)


def providers(device: str) -> list[str]:
    """All of them; on a CPU, without the one that does without CUDA graphs."""
    return [name for name in PROVIDERS if device == "cuda" or name != EAGER]


def row_of(provider: str, found: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    """What is recorded of one provider: tokens a second, bytes, agreement; or why it is missing."""
    row = {"provider": provider, **common, "versions": common["versions"] | found["versions"]}
    if "missing" in found:
        return row | {"missing": found["missing"]}
    speeds = percentiles([found["tokens"] / seconds for seconds in found["seconds"]])
    names = ("tokens", "trainer_bytes", "added_bytes", "kv_bytes", "used_bytes", "parity_mean", "parity_max",
             "importance_ratio", "sleep_freed_bytes", "sleep_ms", "wake_ms")
    sync = {"sync_ms": round(median(found["sync_ms"]), 4)} if "sync_ms" in found else {}
    return row | speeds | {name: found[name] for name in names if name in found} | sync


def show(rows: list[dict[str, Any]], title: str) -> None:
    """The run as a table."""
    result = Table("provider", "tokens/s p20", "p50", "p80", "trainer MiB", "added MiB", "KV MiB", "in use MiB",
                   "parity mean", "max", "sync ms", title=title)
    for row in rows:
        if row.get("missing"):
            continue
        speeds = [f"{row[name]:.0f}" for name in ("p20", "p50", "p80")]
        sizes = [f"{row[name] / MIB:.2f}" if name in row else ""
                 for name in ("trainer_bytes", "added_bytes", "kv_bytes", "used_bytes")]
        rest = [f"{row[name]:{form}}" if name in row else ""
                for name, form in (("parity_mean", ".5f"), ("parity_max", ".5f"), ("sync_ms", ".4f"))]
        result.add_row(row["provider"], *speeds, *sizes, *rest)
    console.print(result)
    for row in rows:
        if row.get("missing"):
            console.print(f"  {row['provider']} is missing: {row['missing']}", style="dim", highlight=False)


def measure(names: list[str], common: dict[str, Any], rounds: int, folder: Path) -> list[dict[str, Any]]:
    """A row of each provider, one after the other: each has the card to itself."""
    options = ["--folder", str(folder), "--shape", common["shape"], "--device", common["device"],
               "--rounds", str(rounds)]
    threads, rows = {"OMP_NUM_THREADS": str(common["threads"])}, []
    for name in names:
        console.print(f"{name} ...", style="dim")
        found = child.run("bench.rollout.provider", name, *options, settings=threads)
        if found.get("failed"):  # a provider that cannot run here says so itself
            raise click.ClickException(f"{found['log']}\n{name}: {found['missing']}")
        rows.append(row_of(name, found, common))
    return rows


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="The card if there is one, else the CPU.")
@click.option("--shape", type=click.Choice(list(SHAPES)), help="full on a card, tiny on the CPU.")
@click.option("--provider", "names", multiple=True, type=click.Choice(PROVIDERS), help="By default all.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=2), help="Timed calls of each.")
@click.option("--threads", default=1, show_default=True, help="Threads on the CPU.")
@click.option("--weights", type=click.Path(file_okay=False, path_type=Path), help="A folder where the weights are "
              "made once and kept (16 GB for the 8B shape); by default a temporary one.")
@click.option("--run", "run_name", help="Joins the rows of several calls: providers of one run are compared.")
@click.option("--output", default=RESULTS, type=click.Path(dir_okay=False, path_type=Path), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the rows, one JSON object a line, and append none.")
@click.option("--targets", is_flag=True, help="Measure nothing; show which targets the rows of --output meet.")
def main(
    device: str | None, shape: str | None, names: tuple[str, ...], rounds: int, threads: int, weights: Path | None,
    run_name: str | None, output: Path, as_json: bool, targets: bool,
) -> None:
    """Measure rollouts, append rows, and show which targets are met."""
    console.stderr = as_json
    common = machine(PACKAGES)  # first, so that the commit is the one at the start of the run
    device = device or ("cuda" if common["gpu"] else "cpu")
    shape = shape or ("full" if device == "cuda" else "tiny")
    if not targets:
        size = SHAPES[shape]
        common |= {"run": run_name or datetime.now().isoformat(timespec="seconds"), "device": device, "shape": shape,
                   "threads": threads, "sequences": size.sequences, "completion_tokens": size.completion_tokens,
                   "prompt_tokens": size.prompt_tokens}
        with model_folder(weights, shape, device) as folder:
            rows = measure(list(names) or providers(device), common, rounds, folder)
        for row in rows:
            if as_json:
                click.echo(json.dumps(row))
            else:
                append_row(output, row)
        show(rows, f"{size.sequences} sequences x {size.completion_tokens} tokens, {shape}, "
                   f"{common['gpu'] or common['cpu']}")
    console.print(target_table(judged(GOALS, read_rows(output), None if targets else device)))


if __name__ == "__main__":
    main()
