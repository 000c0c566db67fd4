"""What it costs that ranks add up their gradients: the adapter of a model at its real size, over the loopback address.

    OMP_NUM_THREADS=1 python -m bench.ranks.gradients --ranks 2 --ranks 4

By default it is LoRA of rank 32 on all linear layers of Llama-3.1-8B. The seconds are of the whole verb: gradients are
copied into the host's buffer, summed, and copied back. Between machines the network's own pace is the bound. A step of
such a model takes minutes; the sum may take 1% of it.
"""

import tempfile
import time
from pathlib import Path
from statistics import median

import click
import torch
from rich.console import Console
from torch import nn

from bench.common import options, tables
from bench.common.rows import append_row, machine
from lowmem_grpo.train.distributed import ranks
from tests.attacks.ranked_run import Ranked

RESULTS = Path(__file__).resolve().parents[1] / "results" / "ranks_gradients.jsonl"
LAYERS = 32
SHAPES = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096)]  # 8B
RANK = 32
console = Console(width=100)


def adapter(share: float) -> list[nn.Parameter]:
    """Factors of every layer, each with a gradient."""
    shapes = [shape for a, b in SHAPES for shape in ((RANK, a), (b, RANK))] * max(1, round(LAYERS * share))
    made = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def summed(folder: Path, rank: int, share: float, rounds: int) -> tuple[int, list[float]]:
    """Bytes of the gradients in fp32, and the seconds of each sum but the first, which makes the buffer."""
    held, taken = adapter(share), []
    for _ in range(rounds + 1):
        ranks().meet("the next round")
        began = time.perf_counter()
        ranks().sum_gradients(held)
        taken.append(time.perf_counter() - began)
    assert held[0].grad is not None and held[0].grad.max() == ranks().count ** (rounds + 1)
    return sum(4 * parameter.numel() for parameter in held), taken[1:]


@click.command(help=__doc__)
@click.option("--ranks", "counts", multiple=True, default=(2, 4), show_default=True, type=click.IntRange(min=2))
@click.option("--share", default=1.0, show_default=True, help="Of the layers: less is a smaller model.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1))
@options.output(RESULTS)
def main(counts: tuple[int, ...], share: float, rounds: int, output: Path) -> None:
    rows = []
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="lowmem-ranks-") as root:
            found = Ranked(Path(root), count, summed, share=share, rounds=rounds).wait(600)
        if not isinstance(found[0], tuple):
            raise click.ClickException(f"{count} ranks ended with {found[0]}")
        size, slowest = found[0][0], [max(times) for times in zip(*(taken for _, taken in found), strict=True)]
        row = {"ranks": count, "bytes": size, "rounds": rounds, "seconds": round(median(slowest), 4),
               "most": round(max(slowest), 4)}
        append_row(output, row | machine())
        rows.append([str(count), f"{size / 2**20:.0f}", f"{row['seconds']:.3f}", f"{row['most']:.3f}"])
    console.print(tables.terminal(None, ["ranks", "gradients, MiB", "seconds", "most"], rows))


if __name__ == "__main__":
    main()
