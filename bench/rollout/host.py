"""Measure the host's work for a sampled token: processor milliseconds, calls of functions, and operations of torch.

    python -m bench.rollout.host                              our own engine
    python -m bench.rollout.host --engine vllm                on a pretend card, whose kernels take no time, or a CPU

Each figure is that of a call with LONG tokens per row less that of a call with SHORT ones, divided by the tokens in
between: what happens once in a call cancels out. Calls (the profiler's, C functions included) and operations do not
depend on other programs; of the seconds the least of several rounds counts. Our own engine runs on the CPU, where a
recorded step is replaced by nothing, as if it took the card no time, and draws from DRAWN logits. vLLM on the CPU also
computes the embedded model, in one thread. Nothing here is a time on a card.
"""

import cProfile
import json
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import click
import torch
from torch import Tensor

from bench.common import child, options, tables
from bench.common.rows import machine
from bench.gate import pretend
from bench.launches import Launches
from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.memory.cards import GRAPH_PLACES

SHORT, LONG = 8, 40  # tokens per row; both are multiples of the steps between two looks at the rows
ROUNDS, GENERATIONS, DRAWN = 5, 8, 16
ENGINES = ("transformers", "vllm")


def replay_nothing(work: Callable[[], Tensor], beside: Any = None) -> Callable[[], Tensor]:
    """Run a step once in place of recording it; return a function that gives its logits again."""
    logits = work()
    return lambda: logits


class Timed:
    """One engine with the embedded model and LoRA, and prompts for a number of rows."""

    def __init__(self, engine: str, device: str, rows: int) -> None:
        torch.set_num_threads(1)
        model, _ = FastLanguageModel.from_pretrained(
            "tiny", fast_inference=engine, device=device, dtype="bfloat16", max_seq_length=64, max_num_seqs=rows)
        model = FastLanguageModel.get_peft_model(model, r=8)
        self.engine: Any = model.engine()
        self.prompts = [[number % 50 + 5, 9, 10, 11] for number in range(rows // GENERATIONS)]
        if engine == "transformers":
            step = self.engine.step
            step.record, step.block = replay_nothing, GRAPH_PLACES
            logits = step.logits
            step.logits = lambda: logits()[:, :DRAWN]
        self.sample(LONG)  # warms up, and records

    def sample(self, tokens: int) -> None:
        self.engine.generate(self.prompts, SamplingParams(n=GENERATIONS, max_tokens=tokens, seed=1, ignore_eos=True))

    def seconds(self, tokens: int) -> float:
        begin = time.process_time()
        self.sample(tokens)
        return time.process_time() - begin

    def calls(self, tokens: int) -> int:
        profile = cProfile.Profile()
        profile.runcall(self.sample, tokens)
        return sum(entry.callcount for entry in profile.getstats())

    def operations(self, tokens: int) -> int:
        with Launches() as launches:
            self.sample(tokens)
        return launches.counts.total()


def a_token(count: Callable[[int], float]) -> float:
    """Return what a call counts for a token, without what happens once in a call."""
    return (count(LONG) - count(SHORT)) / (LONG - SHORT)


def run(engine: str, device: str, rows: int) -> dict[str, float]:
    """Return the figures of one engine and number of rows; a separate process calls this."""
    timed = Timed(engine, device, rows)
    least = {tokens: min(timed.seconds(tokens) for _ in range(ROUNDS)) for tokens in (SHORT, LONG)}
    return {"ms": round(1e3 * a_token(least.__getitem__), 3), "calls": round(a_token(timed.calls), 1),
            "operations": round(a_token(timed.operations), 1)}


@click.command(help=__doc__)
@click.option("--engine", "engines", multiple=True, type=click.Choice(ENGINES), default=ENGINES[:1])
@click.option("--rows", "sizes", multiple=True, type=click.IntRange(min=GENERATIONS), default=(8, 64, 256))
@options.DEVICE
@options.AS_JSON
def main(engines: tuple[str, ...], sizes: tuple[int, ...], device: str | None, as_json: bool) -> None:
    """Print a row for each engine and number of rows."""
    where = machine()
    device = device or ("cuda" if where["gpu"] else "cpu")
    rows = []
    for engine, size in product(engines, sizes):
        at = device if engine == "vllm" else "cpu"
        settings = {"OMP_NUM_THREADS": "1"} | (pretend.environment(where["gpu"]) if at == "cuda" else {})
        found = child.call("bench.rollout.host:run", {"engine": engine, "device": at, "rows": size}, settings=settings)
        rows.append({"engine": engine, "device": where["gpu"] if at == "cuda" else at, "rows": size, **found})
    lines = tables.markdown(list(rows[0]), [[str(value) for value in row.values()] for row in rows])
    click.echo("\n".join(map(json.dumps, rows) if as_json else lines))


if __name__ == "__main__":
    main()
