"""How the time of sampling is spent where few answers are much longer than the others, and where all are alike.

    OMP_NUM_THREADS=1 python -m bench.rollout.long_tail --engine transformers

The model in the package draws 64 answers whose lengths are given (`lengths.py`): "even" ones, "long tail" in a random
order, and the same "longest first". With `--rows 16` memory has room for 16 of them at a time. The cases take turns.
Each row has medians over rounds: seconds and processor seconds of a call, seconds of each phase, and the tail's share.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.console import Console

from bench.common import options, tables
from bench.common.rows import append_row, machine
from bench.rollout.lengths import even, long_tail
from bench.rollout.talk import random_ids
from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.engines.base import Request
from lowmem_grpo.types import Rollout

RESULTS = Path(__file__).resolve().parents[1] / "results" / "long_tail.jsonl"
ANSWERS, PROMPT, LONGEST = 64, 16, 480
console = Console(width=130)


@dataclass
class Answers:
    """Prompts that are answered once, with so many tokens each."""

    lengths: list[int]
    given: dict[int, Rollout] = field(default_factory=dict)
    asked: bool = False

    def take(self, busy: bool) -> list[Request]:
        if self.asked:
            return []
        self.asked = True
        return [Request(key, random_ids(PROMPT, key), length, seed=key) for key, length in enumerate(self.lengths)]

    def give(self, key: int, rollout: Rollout) -> None:
        self.given[key] = rollout


def cases() -> dict[str, list[int]]:
    """The tokens of the answers, in the order in which they are asked for."""
    mixture = long_tail(ANSWERS, LONGEST)
    return {"even": even(ANSWERS, LONGEST), "long tail": mixture, "longest first": sorted(mixture, reverse=True)}


def engine_of(name: str, rows: int) -> Any:
    """An engine that decodes so many rows together."""
    bare, _ = FastLanguageModel.from_pretrained(
        "tiny", max_seq_length=PROMPT + LONGEST, load_in_4bit=False, fast_inference=name, max_num_seqs=rows)
    engine = FastLanguageModel.get_peft_model(bare, r=8, use_gradient_checkpointing=False).eval().engine()
    if name == "transformers":
        engine.bound.lowered = rows
    return engine


def measured(engine: Any, lengths: list[int]) -> dict[str, float]:
    """One call."""
    engine.on_policy_update(engine.policy_version + 1)
    engine.pace.take()
    answers, begin = Answers(lengths), (time.perf_counter(), time.process_time())
    engine.converse(answers, SamplingParams(ignore_eos=True))
    spent = time.perf_counter() - begin[0], time.process_time() - begin[1]
    assert [len(answers.given[key].completion_ids) for key in range(len(lengths))] == lengths
    found = {name.removeprefix("time/").removeprefix("sampling/"): value
             for name, value in engine.pace.take().metrics().items()}
    return {"seconds": spent[0], "cpu_seconds": spent[1], **found}


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure; one that some round lacks is left out."""
    names = set.intersection(*(set(one) for one in rounds))
    return {name: round(median(one[name] for one in rounds), 4) for name in sorted(names)}


@click.command(help=__doc__)
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Calls of each case.")
@click.option("--rows", default=ANSWERS, show_default=True, type=click.IntRange(min=1), help="Decoded together.")
@click.option("--engine", default="transformers", show_default=True, type=click.Choice(["transformers", "vllm"]))
@options.output(RESULTS)
def main(rounds: int, rows: int, engine: str, output: Path) -> None:
    where, sampler = machine(), engine_of(engine, rows)
    found: dict[str, list[dict[str, float]]] = {case: [] for case in cases()}
    for number in range(rounds + 1):  # the first one warms up
        for case, lengths in cases().items():
            figures = measured(sampler, lengths)
            found[case] += [figures] if number else []
    cells = []
    for case, calls in found.items():
        figures = medians(calls)
        tokens = sum(cases()[case])
        row = {"engine": engine, "case": case, "rows": rows, "answers": ANSWERS, "tokens": tokens, "longest": LONGEST}
        append_row(output, row | {"rounds": rounds, "threads": torch.get_num_threads(), **figures} | where)
        cells.append((engine, case, str(rows), f"{figures['seconds']:.2f}", f"{figures['cpu_seconds']:.2f}",
                      f"{tokens / figures['seconds']:.0f}", *(f"{figures[name]:.2f}" for name in (
                          "prefill_s", "full_s", "tail_s")), f"{figures['tail_share']:.0%}"))
    columns = ("engine", "case", "rows", "seconds", "cpu s", "tokens/s", "prompts, s", "full width, s", "tail, s",
               "tail")
    console.print(tables.terminal(None, columns, cells))


if __name__ == "__main__":
    main()
