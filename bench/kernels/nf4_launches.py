"""Times launches of the NF4 decode kernel in CUDA graphs, over weights that the cache does not hold, beside the dense
product: what `narrow_launch` in lowmem_grpo/kernels/few_rows.py was chosen by.

    python -m bench.kernels.nf4_launches               on a card: every launch at every size
    python -m bench.kernels.nf4_launches --summary     no measuring: the rule's launches beside the best, of the rows

Keys of a row such as "(8, 16, 2, 3)" are rows, outputs and warps of a block, and stages (negative: twice the warps);
values are microseconds.
"""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
import torch
from torch import Tensor

from bench.common import options
from bench.common.rows import append_row, machine, read_rows
from lowmem_grpo.kernels.few_rows import narrow_launch
from lowmem_grpo.kernels.nf4 import NF4Weight, nf4_dequantize
from lowmem_grpo.kernels.nf4_decode import nf4_decode_triton
from lowmem_grpo.kernels.triton_utils import Launch

SIZES = [(14336, 4096), (4096, 14336), (4096, 4096), (22016, 2048), (2048, 11008), (2560, 2048)]  # outputs, inputs
ROWS = (1, 8, 16, 32, 64)
COLD = 200e6  # bytes of weights in turn, more than any cache holds
WRONG = 0.02  # of the largest value
Key = tuple[int, int, int, int]


def keys(rows: int) -> Iterator[Key]:
    """Yield the launches that are tried for so many rows."""
    block = max(8, 1 << (rows - 1).bit_length())
    for outputs, split, stages in product((16, 32, 64, 128), (1, 2, 4, 8, 16), (2, 3, 4)):
        held = 32 <= outputs * split <= 512 and block * split <= 256 and block * outputs * split <= 16384
        if held and (stages < 4 or (block <= 32 and split <= 8)):
            yield block, outputs, split, stages
    if block <= 16:
        yield from ((block, 64, 4, -3), (block, 32, 4, -3), (block, 64, 2, -3))


def launch_of(key: Key) -> Launch:
    block, outputs, split, stages = key
    return Launch({"BLOCK_M": block, "BLOCK_N": outputs, "SPLIT": split, "BYTES": 32},
                  num_warps=split if stages > 0 else 2 * split, num_stages=abs(stages))


def weight(outputs: int, inputs: int) -> NF4Weight:
    from bitsandbytes.nn import Params4bit

    values = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02
    return NF4Weight.from_bitsandbytes(
        Params4bit(values, requires_grad=False, compress_statistics=True, quant_type="nf4").cuda())


def decode(x: Tensor, held: NF4Weight, key: Key) -> Tensor:
    return nf4_decode_triton(x, held.tensors, held.sizes, list(held.out_features), None, None, 1.0, None, None,
                             launch=launch_of(key))


def microseconds(call: Callable[[int], Tensor], calls: int) -> float:
    """Return the median time of a call in a graph of several."""
    call(0)
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for number in range(calls):
            call(number)
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / calls)
    return median(times[1:])


def measured(rows: int, held: list[NF4Weight], dense: list[Tensor]) -> dict[str, Any]:
    """Return the microseconds of every launch that computes what float64 does, and why the others have none."""
    x = torch.randn(rows, dense[0].shape[1], device="cuda", dtype=torch.bfloat16)
    truth = x.double() @ nf4_dequantize(held[0]).double().T
    found: dict[str, Any] = {"dense": microseconds(lambda n: x @ dense[n % len(dense)].T, len(held))}
    for key in keys(rows):
        try:
            error = float((decode(x, held[0], key).double() - truth).abs().max() / truth.abs().max())
            found[str(key)] = (microseconds(lambda n, key=key: decode(x, held[n], key), len(held)) if error < WRONG
                               else f"wrong by {error:.2g}")
        except RuntimeError as error:
            found[str(key)] = type(error).__name__
    return found


def summary(rows: list[dict[str, Any]]) -> str:
    """Return how far the rule's launches are from the best ones, in the mean."""
    shares = []
    for row in rows:
        values = launch_values(row)
        launch = narrow_launch(row["M"], row["O"], row["I"], 90)
        name = str((*(launch.constexprs[size] for size in ("BLOCK_M", "BLOCK_N", "SPLIT")), launch.num_stages))
        shares.append(values[name] / min(values.values()))
    return f"{len(shares)} sizes: the rule's launch takes {fmean(shares):.2f} times the best one's time"


def launch_values(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("(") and isinstance(value, float)}


@click.command(help=__doc__)
@click.option("--summary", "only_summary", is_flag=True, help="Only compare the rows that are there.")
@options.output("nf4_launches")
def main(only_summary: bool, output: Path) -> None:
    if not only_summary:
        here = machine()
        for outputs, inputs in SIZES:
            held = [weight(outputs, inputs) for _ in range(max(4, min(16, int(COLD / (outputs * inputs / 2)))))]
            dense = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
            for rows in ROWS:
                append_row(output, {"O": outputs, "I": inputs, "M": rows, **measured(rows, held, dense), **here})
    click.echo(summary(read_rows(output)))


if __name__ == "__main__":
    main()
