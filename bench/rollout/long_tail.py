"""How the time of sampling is spent where few answers are much longer than the others, and where all are alike.

    OMP_NUM_THREADS=1 python -m bench.rollout.long_tail --engine transformers

The model in the package draws 64 answers whose lengths are given: "even" ones, "long tail" in a random order, and the
same "longest first". With `--rows 16` memory has room for 16 of them at a time. The cases take turns. Each row has
medians over rounds: seconds and processor seconds of a call, seconds of each phase, and the tail's share.

The long-tailed law is fitted to what the data set 96kevinli29/SFT-Math-45k states of its 45,000 answers by DeepSeek-R1
(from open-r1/OpenR1-Math-220k), in characters: half of them have at most 12,980, nine tenths 32,888, 99 of 100 have
50,593, the longest 59,996, the mean is 16,254. A log-normal law through the first two, cut at the longest, has a mean
of 16,500 and 59,996 at 99 of 100. Only ratios are used here, so that characters stand for tokens.
"""

import random
import time
from dataclasses import dataclass, field
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Any

import click
import torch

from bench.common import options, rounds, tables
from bench.common.rows import append_row, machine
from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.engines.base import Request
from lowmem_grpo.types import Rollout

ANSWERS, PROMPT, LONGEST = 64, 16, 480
MEDIAN, NINE_TENTHS, MOST = 12_980, 32_888, 59_996  # characters of answers
SPREAD = log(NINE_TENTHS / MEDIAN) / NormalDist().inv_cdf(0.9)
TOKENS = range(5, 300)  # ids that every model here has
SHOWN = {"engine": "engine", "case": "case", "rows": "rows", "seconds": ("seconds", ".2f"),
         "cpu s": ("cpu_seconds", ".2f"), "tokens": "tokens", "prompts, s": ("prefill_s", ".2f"),
         "full width, s": ("full_s", ".2f"), "tail, s": ("tail_s", ".2f"), "tail": ("tail_share", ".0%")}


def characters(share: float) -> float:
    """Return the length that this share of the answers has at most."""
    return min(MOST, MEDIAN * exp(SPREAD * NormalDist().inv_cdf(share)))


def long_tail(count: int, longest: int, seed: int = 0) -> list[int]:
    """Return the tokens of so many answers, the longest of which has `longest`: evenly spaced quantiles, in a random
    order."""
    lengths = [characters((number + 0.5) / count) for number in range(count)]
    scaled = [max(1, round(longest * length / lengths[-1])) for length in lengths]
    random.Random(seed).shuffle(scaled)
    return scaled


def cases() -> dict[str, list[int]]:
    """Return the tokens of the answers, in the order in which they are asked for."""
    mixture = long_tail(ANSWERS, LONGEST)
    return {"even": [round(fmean(mixture))] * ANSWERS, "long tail": mixture,
            "longest first": sorted(mixture, reverse=True)}


@dataclass
class Answers:
    """Prompts of random tokens that are answered once, with so many tokens each."""

    lengths: list[int]
    given: dict[int, Rollout] = field(default_factory=dict)
    asked: bool = False

    def take(self, busy: bool) -> list[Request]:
        if self.asked:
            return []
        self.asked = True
        return [Request(key, random.Random(key).choices(TOKENS, k=PROMPT), length, seed=key)
                for key, length in enumerate(self.lengths)]

    def give(self, key: int, rollout: Rollout) -> None:
        self.given[key] = rollout


def engine_of(name: str, rows: int) -> Any:
    """Return an engine that decodes so many rows together."""
    bare, _ = FastLanguageModel.from_pretrained(
        "tiny", max_seq_length=PROMPT + LONGEST, load_in_4bit=False, fast_inference=name, max_num_seqs=rows)
    engine = FastLanguageModel.get_peft_model(bare, r=8, use_gradient_checkpointing=False).eval().engine()
    if name == "transformers":
        engine.bound.lowered = rows
    return engine


def measured(engine: Any, lengths: list[int]) -> dict[str, float]:
    """Return the figures of one call."""
    engine.on_policy_update(engine.policy_version + 1)
    engine.pace.take()
    answers, begin = Answers(lengths), (time.perf_counter(), time.process_time())
    engine.converse(answers, SamplingParams(ignore_eos=True))
    spent = time.perf_counter() - begin[0], time.process_time() - begin[1]
    assert [len(answers.given[key].completion_ids) for key in range(len(lengths))] == lengths
    phases = {name.removeprefix("time/").removeprefix("sampling/"): value
              for name, value in engine.pace.take().metrics().items()}
    return {"seconds": spent[0], "cpu_seconds": spent[1], **phases}


def medians(calls: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure; one that some round lacks is left out."""
    names = set.intersection(*(set(call) for call in calls))
    return {name: round(median(call[name] for call in calls), 4) for name in sorted(names)}


@click.command(help=__doc__)
@click.option("--rounds", "count", default=5, show_default=True, type=click.IntRange(min=1), help="Calls of a case.")
@click.option("--rows", default=ANSWERS, show_default=True, type=click.IntRange(min=1), help="Decoded together.")
@click.option("--engine", default="transformers", show_default=True, type=click.Choice(["transformers", "vllm"]))
@options.output("long_tail")
def main(count: int, rows: int, engine: str, output: Path) -> None:
    where, sampler = machine(), engine_of(engine, rows)
    calls = {case: partial(measured, sampler, lengths) for case, lengths in cases().items()}
    made = [{"engine": engine, "case": case, "rows": rows, "answers": ANSWERS, "tokens": sum(cases()[case]),
             "longest": LONGEST, "rounds": count, "threads": torch.get_num_threads(), **medians(figures)}
            for case, figures in rounds.take_turns(calls, count).items()]
    for row in made:
        append_row(output, row | where)
    tables.print_rows(made, SHOWN)


if __name__ == "__main__":
    main()
