"""How much time a slow reward function adds to a step: called after sampling, and while other groups are sampled.

    OMP_NUM_THREADS=1 python -m bench.loop.reward_overlap

The model in the package samples 8 prompts 8 times, 256 tokens each, 16 rows at a time, so that groups finish one
after the other, as with any engine that has more sequences than fit at once. The functions sleep, like a reward that
waits for a judge, a sandbox or a service. (A function that computes in Python competes with decoding and gains
little.) The cases take turns, after a step to warm up. `ratio` is the median over rounds of a case's step time
divided by that of the step whose reward costs nothing. `waited` is the median of the seconds that a step waited for
rewards, which other load on the machine hardly changes. `added_share` is `waited` divided by the free step's time.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.console import Console

from bench.common import options, tables
from bench.common.rows import append_row, machine
from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer, SamplingParams
from lowmem_grpo.recipes.arithmetic import make_dataset
from lowmem_grpo.rewards import Reward

RESULTS = Path(__file__).resolve().parents[1] / "results" / "reward_overlap.jsonl"
GENERATIONS, AT_ONCE = 8, 16  # completions of a prompt, rows that are decoded together
SECONDS, FREE = 0.2, "none"
TARGET = 1.10
console = Console(width=110)


class Sleeper(Reward):
    """Pays each text's length, and sleeps some seconds a call and some a completion."""

    def __init__(self, name: str, a_call: float, a_completion: float) -> None:
        super().__init__(name)
        self.a_call, self.a_completion = a_call, a_completion

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        time.sleep(self.a_call + self.a_completion * len(texts))
        return [float(len(text)) for text in texts]


class AsyncSleeper(Sleeper):
    """The same, awaited."""

    async def __call__(self, *, completions: list[Any], **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        await asyncio.sleep(self.a_call)
        return [float(len(str(completion))) for completion in completions]


@dataclass
class Case:
    """A function, when it is called, and what its steps took."""

    name: str
    early: bool
    trainer: GRPOTrainer
    steps: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)

    def step(self) -> None:
        """One rollout and its update."""
        clock = self.trainer.clock
        clock.restart()
        self.trainer.update(self.trainer.rollout())
        self.steps.append(time.perf_counter() - clock.started)
        self.waited.append(clock.seconds["reward"])
        self.hidden.append(clock.reward_hidden)


def functions(completions: int) -> dict[str, Callable[[], Reward]]:
    """Rewards of 0.2 s in three forms, and one that costs nothing."""
    return {
        FREE: lambda: Sleeper("none", 0.0, 0.0),
        "async, 0.2 s a call": lambda: AsyncSleeper("waits", SECONDS, 0.0),
        "plain, 0.2 s a batch, by completion": lambda: Sleeper("linear", 0.0, SECONDS / completions),
        "plain, 0.2 s a call": lambda: Sleeper("call", SECONDS, 0.0),
    }


def make_cases(prompts: int, tokens: int, folder: Path) -> list[Case]:
    """A trainer for each function, called late and early; all of one model."""
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=tokens + 128, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(bare, r=8, use_gradient_checkpointing=False)
    rows = make_dataset("train", 8 * prompts)
    cases = []
    for name, made in functions(prompts * GENERATIONS).items():
        for early in (False, True)[: 1 if name == FREE else 2]:
            args = GRPOConfig(
                output_dir=str(folder / f"{len(cases)}"), num_generations=GENERATIONS, max_steps=1000,
                per_device_train_batch_size=prompts * GENERATIONS, max_completion_length=tokens, learning_rate=1e-6,
                vllm_sampling_params=SamplingParams(ignore_eos=True), parity_steps=0, disable_tqdm=True,
                save_strategy="no", score_while_sampling=early,
            )
            trainer = GRPOTrainer(model, made(), args, rows)
            trainer.memory.rollout.lowered = AT_ONCE
            cases.append(Case(name, early, trainer))
    return cases


def measure(cases: list[Case], rounds: int) -> None:
    """Steps in turn, the order reversed from round to round."""
    cases[0].trainer.rollout()  # to warm up
    for number in range(rounds):
        for case in reversed(cases) if number % 2 else cases:
            case.step()
        console.print(f"round {number + 1} of {rounds}")


def row(case: Case, free: Case, settings: dict[str, Any]) -> dict[str, Any]:
    """A case's row, compared with the case that costs nothing."""
    ratio = median(own / other for own, other in zip(case.steps, free.steps, strict=True))
    return {
        "reward": case.name, "score_while_sampling": case.early, "ratio": round(ratio, 4),
        "added_share": round(median(case.waited) / median(free.steps), 4), "step": round(median(case.steps), 4),
        "waited": round(median(case.waited), 4), "hidden": round(median(case.hidden), 4), **settings,
    }


@click.command(help=__doc__)
@click.option("--prompts", default=8, show_default=True, type=click.IntRange(min=2))
@click.option("--tokens", default=256, show_default=True, type=click.IntRange(min=2), help="Of each completion.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Steps of each case.")
@options.output(RESULTS)
def main(prompts: int, tokens: int, rounds: int, output: Path) -> None:
    where = machine()
    settings = {"prompts": prompts, "generations": GENERATIONS, "at_once": AT_ONCE, "tokens": tokens,
                "rounds": rounds, "threads": torch.get_num_threads()}
    with tempfile.TemporaryDirectory() as folder:
        cases = make_cases(prompts, tokens, Path(folder))
        measure(cases, rounds)
    rows = [row(case, cases[0], settings) for case in cases]
    for found in rows:
        append_row(output, found | where)
    table = tables.terminal(None, ("reward", "while sampling", "step, s", "x free", "waited, s", "hidden, s"), (
        [found["reward"], str(found["score_while_sampling"]),
         *(f"{found[name]:.3f}" for name in ("step", "ratio", "waited", "hidden"))] for found in rows
    ))
    console.print(table, f"target: below {TARGET:g} times the step whose reward costs nothing")


if __name__ == "__main__":
    main()
