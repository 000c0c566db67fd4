"""Check that every setting learns, and that settings that must agree do: arithmetic, with several seeds.

    python -m bench.learning.bench      # 13 settings, five seeds, 30 steps of 128 completions

Each run leaves a row in bench/results/learning.jsonl. A quick run writes rows, table and picture to runs/learning-quick
instead. The command fails if a setting does not learn, or if two settings that must agree do not.
"""

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from bench.common import child
from bench.common.rows import RESULTS, append_row, machine, newest, read_rows
from bench.learning.report import failures, write_report
from bench.learning.settings import SETTINGS

HERE = Path(__file__).resolve().parent
QUICK = Path("runs") / "learning-quick"


def one(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Run one setting with one seed, in a separate process with one thread; return its row, or why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"name": name, "seed": seed, "steps": steps, "folder": folder}
        found = child.call("bench.learning.provider:run", given, settings={"OMP_NUM_THREADS": "1"})
    kept = {"missing": found["missing"]} if found.get("failed") else found
    return {"setting": name, "seed": seed, "steps": steps, **kept}


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Two seeds, fewer steps.")
@click.option("--seeds", type=int, help="How many; five, or two with --quick.")
@click.option("--steps", type=int, help="Optimizer steps of each run.")
@click.option("--setting", "names", multiple=True, help="Only this setting; may be repeated.")
@click.option("--jobs", type=int, default=os.cpu_count(), show_default=True, help="Runs at a time.")
@click.option("--report", is_flag=True, help="Only write learning.md and its picture from the rows.")
def main(
    quick: bool, seeds: int | None, steps: int | None, names: tuple[str, ...], jobs: int, report: bool
) -> None:
    path, folder = (QUICK / "learning.jsonl", QUICK) if quick else (RESULTS / "learning.jsonl", HERE)
    if not report:
        wanted = [setting.name for setting in SETTINGS if not names or setting.name in names]
        tasks = [(name, seed) for seed in range(seeds or (2 if quick else 5)) for name in wanted]
        about = machine()
        with ThreadPoolExecutor(jobs) as pool:
            for row in pool.map(lambda task: one(*task, steps or (20 if quick else 30)), tasks):
                append_row(path, row | about)
                last = row.get("missing") or f"right at the end {row['right'][-1]:.1%}, {row['seconds']:.0f} s"
                click.echo(f"{row['setting']}, seed {row['seed']}: {last}")
    rows = list(newest(read_rows(path), "setting", "seed").values())
    click.echo(write_report(rows, folder))
    bad = failures(rows)
    for line in bad:
        click.echo(line)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
