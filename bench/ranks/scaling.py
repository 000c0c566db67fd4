"""What a second process brings: steps of one process, beside steps of two with twice the prompts.

    OMP_NUM_THREADS=1 python -m bench.ranks.scaling

Weak scaling: each rank has as many prompts as the single process, and one thread. Both kinds of run take turns, and
the pairs are compared. "Scaling" is how many times as many completions a second two ranks make; 1.7 are wanted on two
cores.
"""

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console

from bench.common import options, tables
from bench.common.rows import append_row, machine
from tests.attacks.ranked_run import Ranked, trainer

RESULTS = Path(__file__).resolve().parents[1] / "results" / "ranks_scaling.jsonl"
PROMPTS, GENERATIONS, LENGTH, STEPS = 8, 8, 48, 8
console = Console(width=100)


def step_times(folder: Path, rank: int, prompts: int) -> list[float]:
    """Seconds of each step but the first two, which make what later ones use again."""
    rows = [{"prompt": f"Start with {n}. Add {n + 3}. Multiply by 2. What is the result?\n"} for n in range(1, 65)]
    run = trainer(folder, rows=rows, per_device_train_batch_size=prompts * GENERATIONS, num_generations=GENERATIONS,
                  max_completion_length=LENGTH, max_steps=STEPS, save_strategy="no", preflight=False, beta=0.0)
    run.train()
    return [line["step_time"] for line in run.state.log_history][2:]


def seconds(folder: Path, ranks: int) -> float:
    """The median step of a run in so many processes."""
    found: list[Any] = Ranked(folder, ranks, step_times, prompts=PROMPTS * ranks).wait(300)
    if not isinstance(found[0], list):
        raise click.ClickException(f"a run of {ranks} ended with {found[0]}")
    return median(found[0])


@click.command(help=__doc__)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@options.output(RESULTS)
def main(rounds: int, output: Path) -> None:
    where, pairs = machine(), []
    with tempfile.TemporaryDirectory(prefix="lowmem-ranks-") as root:
        for number in range(rounds):
            order = (1, 2) if number % 2 else (2, 1)
            taken = {ranks: seconds(Path(root) / f"{number}-{ranks}", ranks) for ranks in order}
            pairs.append((taken[1], taken[2]))
    scaling = [2 * one / two for one, two in pairs]
    row = {"prompts_per_rank": PROMPTS, "generations": GENERATIONS, "tokens": LENGTH, "rounds": rounds, "ranks": 2,
           "one_s": round(median(one for one, _ in pairs), 4), "two_s": round(median(two for _, two in pairs), 4),
           "scaling": round(median(scaling), 4), "least": round(min(scaling), 4), "most": round(max(scaling), 4)}
    append_row(output, row | where)
    shown = [f"{row[name]:.3f}" for name in ("one_s", "two_s", "scaling", "least", "most")]
    console.print(tables.terminal(None, ["a step of one, s", "of two, s", "scaling", "least", "most"], [shown]))


if __name__ == "__main__":
    main()
