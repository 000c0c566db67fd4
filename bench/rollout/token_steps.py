"""Decoding without vLLM: token steps as they are and as CUDA graphs, in one process.

    OMP_NUM_THREADS=1 python -m bench.rollout.token_steps                   the model in the package on the CPU
    python -m bench.rollout.token_steps --device cuda --rounds 3            with and without CUDA graphs

The ways answer the same prompts, and take turns, in reversed order from round to round: "plain" runs steps as they are,
and "graph" (on a card) runs what was recorded of them. The ratios are medians over rounds of a way's seconds divided by
those of "plain": processor seconds on the CPU, seconds on a card. It also says whether both drew the same tokens.
"""

import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from bench.common import options, rounds, tables
from bench.common.rows import append_row, machine
from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.engines.transformers_engine import TransformersEngine

PROMPTS = [[(7 * place + index) % 300 + 5 for place in range(24 + 3 * index)] for index in range(8)]
SHOWN: dict[str, tables.Figure] = {"way": "name", "tokens a second": "tokens_per_second",
                                   "seconds / growing": "ratio", "range": "range"}


class Way:
    """An engine that takes its steps in one way."""

    def __init__(self, name: str, engine: TransformersEngine, params: SamplingParams) -> None:
        self.name, self.params, self.seconds = name, params, list[float]()
        self.engine = TransformersEngine(engine.policy, engine.tokenizer, engine.max_seq_length)
        if name != "graph":
            self.engine.step.record, self.engine.step.block = None, 1
        elif self.engine.step.record is None:
            raise click.ClickException("a step of this model cannot be a CUDA graph on this device; the log says why")

    def answer(self) -> list[list[int]]:
        """The tokens of one call, whose time is kept."""
        on_card = self.engine.policy.device.type == "cuda"
        clock = time.perf_counter if on_card else time.process_time
        begin = clock()
        groups = self.engine.generate(PROMPTS, self.params)
        if on_card:
            torch.cuda.synchronize()
        self.seconds.append(clock() - begin)
        return [rollout.completion_ids for group in groups for rollout in group]


def compare(ways: list[Way], count: int) -> dict[str, Any]:
    """The figures of all ways; ways[0] is what the others are divided by."""
    drawn = [way.answer() for way in ways]  # to warm up
    for way in ways:
        way.seconds.clear()
    for way, _ in rounds.in_turn(ways, count):
        way.answer()
    figures: dict[str, Any] = {"same_tokens": sum(tokens == drawn[0] for tokens in drawn[1:]) == len(ways) - 1}
    tokens = sum(map(len, drawn[0]))
    for way in ways:
        figures[f"{way.name}_tokens_per_second"] = round(tokens / median(way.seconds), 1)
        ratios = [mine / base for mine, base in zip(way.seconds, ways[0].seconds, strict=True)]
        figures |= {f"{way.name}_ratio": round(median(ratios), 4),
                    f"{way.name}_range": [round(min(ratios), 4), round(max(ratios), 4)]}
    steps = [way.engine.step for way in ways if way.name == "graph"]
    # without a graph, the seconds of "graph" are those of "plain": the run gave graphs up, or no answer was long enough
    return figures | {"graphs": sum(step.recorded for step in steps),
                      "graphs_kept": all(step.record is not None for step in steps)}


@click.command(help=__doc__)
@options.DEVICE
@click.option("--rounds", "count", default=15, show_default=True, type=click.IntRange(min=2), help="Calls of each way.")
@click.option("--tokens", default=96, show_default=True, type=click.IntRange(min=8), help="Of each answer, at most.")
@options.output("token_steps")
def main(device: str | None, count: int, tokens: int, output: Path) -> None:
    where = machine()
    device, _ = options.place(device, None, where["gpu"])
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=256, load_in_4bit=False, device=device,
                                                fast_inference="transformers")
    model = FastLanguageModel.get_peft_model(bare, r=8, use_gradient_checkpointing=False).eval()
    params, names = SamplingParams(n=4, max_tokens=tokens, seed=3), ["plain"]
    engine: Any = model.engine()
    ways = [Way(name, engine, params) for name in names + (["graph"] if device == "cuda" else [])]
    figures = compare(ways, count)
    row = {"device": device, "rows": len(PROMPTS) * params.n, "tokens": tokens, "rounds": count,
           "threads": torch.get_num_threads(), **figures}
    append_row(output, row | where)
    shown = ({name: figures.get(f"{way.name}_{name}", way.name) for name in SHOWN.values()} for way in ways)
    tables.print_rows(shown, SHOWN, f"same tokens: {figures['same_tokens']}, graphs recorded: {figures['graphs']}")


if __name__ == "__main__":
    main()
