"""The demo's promise, measured: accuracy before and after and training time of recipe `arithmetic`, seed by seed.

    python -m bench.learning.demo --seeds 0 1 2

Each seed leaves a row in bench/results/demo.jsonl; `python -m bench.common.make_results` writes them into
bench/RESULTS.md.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import click

from bench.common.rows import append_row, machine

RESULTS = Path(__file__).parents[1] / "results" / "demo.jsonl"


@click.command(help=__doc__)
@click.option("--seeds", multiple=True, type=int, default=(0, 1, 2), show_default=True)
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def main(seeds: tuple[int, ...], runs: Path) -> None:
    for seed in seeds:
        folder = runs / f"demo-seed-{seed}"
        started = time.perf_counter()
        command = [sys.executable, "-m", "lowmem_grpo", "run", "arithmetic", f"seed={seed}", f"output_dir={folder}",
                   "overwrite_output_dir=true"]
        subprocess.run(command, check=True)
        summary = json.loads((folder / "summary.json").read_text())
        names = ("seed", "accuracy_before", "accuracy_after", "eval_problems", "steps", "train_seconds")
        row = {name: summary[name] for name in names} | {"command_seconds": time.perf_counter() - started}
        append_row(RESULTS, row | machine())
        click.echo(json.dumps(row))


if __name__ == "__main__":
    main()
