"""How much time the scheduler of turns adds where every prompt gets one answer, with no tool and no environment.

    OMP_NUM_THREADS=1 python -m bench.rollout.turn_overhead

The model in the package answers the same prompts three ways: by `generate`, as in a run without turns; by `converse`,
as turns of the engine; and by `play`, through the whole scheduler with its workers. In the case "together" all answers
have the same length. In "one by one" the context ends them at a place that depends on the prompt, so that rows leave
the batch one after the other. The ways take turns, in reversed order from round to round. The ratios are medians over
rounds of a way's processor seconds divided by those of `generate`; an interval holds 95% of such medians over random
choices of the rounds.
"""

import random
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import click
import torch
from rich.console import Console

from bench.common import options, tables
from bench.common.rows import append_row, machine
from bench.rollout.talk import Talk
from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.data.prompts import Prompt, PromptEncoder
from lowmem_grpo.environments.episode import Bounds
from lowmem_grpo.environments.kit import EpisodeEncoder, Kits
from lowmem_grpo.rollout.episodes import Episodes

RESULTS = Path(__file__).resolve().parents[1] / "results" / "turn_overhead.jsonl"
PROMPTS, COMPLETIONS, CONTEXT = 8, 4, 128
CASES = {"together": [20] * PROMPTS, "one by one": list(range(20, 20 + 6 * PROMPTS, 6))}  # digits in the prompts
WAYS = ("generate", "converse", "play")
TARGET = 1.02
console = Console(width=110)
Spent = tuple[float, float]  # processor seconds, seconds


class Sampler:
    """An engine, and the three ways through it."""

    def __init__(self, engine: str) -> None:
        bare, tokenizer = FastLanguageModel.from_pretrained(
            "tiny", max_seq_length=CONTEXT, load_in_4bit=False, fast_inference=engine,
            max_num_seqs=PROMPTS * COMPLETIONS)
        self.engine: Any = FastLanguageModel.get_peft_model(bare, r=8, use_gradient_checkpointing=False).eval().engine()
        self.params = SamplingParams(n=COMPLETIONS, max_tokens=CONTEXT, seed=3, ignore_eos=True)
        self.kits = Kits(tokenizer, [], None, CONTEXT, {})
        self.encoder = EpisodeEncoder(PromptEncoder(tokenizer, CONTEXT), self.kits)

    def prompts(self, digits: list[int]) -> list[Prompt]:
        """Prompts of so many random digits each."""
        draw = random.Random(0)
        texts = ["".join(draw.choices("0123456789", k=count)) for count in digits]
        found = [self.encoder.encode({"prompt": [{"role": "user", "content": text}]}) for text in texts]
        return [prompt for prompt in found if isinstance(prompt, Prompt)]

    def answer(self, way: str, prompts: list[Prompt]) -> Spent:
        """What sampling takes in one way, with nothing cached."""
        self.engine.on_policy_update(self.engine.policy_version + 1)
        begin = time.process_time(), time.perf_counter()
        ids = [prompt.ids for prompt in prompts]
        if way == "generate":
            self.engine.generate(ids, self.params, lambda index, rollouts: None)
        elif way == "converse":
            self.engine.converse(Talk([each for each in ids for _ in range(COMPLETIONS)], 1, CONTEXT), self.params)
        else:
            bounds = Bounds(None, CONTEXT, CONTEXT, None, call_seconds=60, episode_seconds=600)
            Episodes(self.kits, bounds).play(self.engine, prompts, self.params, lambda index, rollouts: None)
        return time.process_time() - begin[0], time.perf_counter() - begin[1]


def interval(ratios: list[float], choices: int = 2000) -> list[float]:
    """Where 95% of the medians of random choices of the rounds lie."""
    draw = random.Random(0)
    cuts = quantiles([median(draw.choices(ratios, k=len(ratios))) for _ in range(choices)], n=40, method="inclusive")
    return [round(cuts[0], 4), round(cuts[-1], 4)]


def compare(sampler: Sampler, prompts: list[Prompt], rounds: int) -> dict[str, Any]:
    """The figures of a case."""
    found: dict[str, list[Spent]] = {way: [] for way in WAYS}
    for way in WAYS:
        sampler.answer(way, prompts)  # to warm up
    for number in range(rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            found[way].append(sampler.answer(way, prompts))
    figures: dict[str, Any] = {"cpu_seconds": round(median(cpu for cpu, _ in found["generate"]), 4)}
    for way in WAYS[1:]:
        pairs = list(zip(found["generate"], found[way], strict=True))
        ratios = [more[0] / less[0] for less, more in pairs]
        figures |= {way: round(median(ratios), 4), f"{way}_interval": interval(ratios),
                    f"{way}_clock": round(median(more[1] / less[1] for less, more in pairs), 4)}
    return figures


@click.command(help=__doc__)
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(min=2), help="Calls of each way.")
@click.option("--engine", default="transformers", show_default=True, type=click.Choice(["transformers", "vllm"]))
@options.output(RESULTS)
def main(rounds: int, engine: str, output: Path) -> None:
    where, sampler, cells = machine(), Sampler(engine), []
    for case, digits in CASES.items():
        figures = compare(sampler, sampler.prompts(digits), rounds)
        row = {"engine": engine, "case": case, "prompts": PROMPTS, "completions": COMPLETIONS, "context": CONTEXT}
        append_row(output, row | {"rounds": rounds, "threads": torch.get_num_threads(), **figures} | where)
        spans = ["{:.4f} ({:.4f} to {:.4f})".format(figures[way], *figures[f"{way}_interval"]) for way in WAYS[1:]]
        cells.append((engine, case, f"{figures['cpu_seconds']:.3f}", *spans))
    columns = ("engine", "case", "generate, cpu s", "converse / generate", "play / generate")
    console.print(tables.terminal(None, columns, cells), f"target: at most {TARGET:g}")


if __name__ == "__main__":
    main()
