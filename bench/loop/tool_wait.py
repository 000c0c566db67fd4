"""How much time slow tools add to a step of episodes, whose environments work side by side while others decode.

    OMP_NUM_THREADS=1 python -m bench.loop.tool_wait

The model in the package plays 32 episodes of 4 turns in an environment whose `step` takes 0.2 s, and in one that
answers at once. The cases take turns, after a step to warm up; `ratio` is the median over rounds of one step time
divided by the other. `waited` are the seconds of a step in which nothing could be decoded.
"""

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.console import Console

from bench.common import options, tables
from bench.common.rows import append_row, machine
from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer, SamplingParams

RESULTS = Path(__file__).resolve().parents[1] / "results" / "tool_wait.jsonl"
GROUPS, GENERATIONS, TURNS, SECONDS = 4, 8, 4, 0.2
TARGET = 1.15
console = Console(width=110)


class Quick:
    """Asks for more until the last turn, and pays each text's length."""

    seconds = 0.0

    def reset(self, seed: int = 0) -> str:
        self.left = TURNS
        return f"Count from {seed % 100}."

    def step(self, reply: str) -> tuple[str, float, bool]:
        time.sleep(self.seconds)
        self.left -= 1
        return "Go on.", float(len(reply) % 7), self.left == 0


class Slow(Quick):
    """The same, in 0.2 s."""

    seconds = SECONDS


def make(factory: type, engine: str, tokens: int, folder: Path, model: Any) -> GRPOTrainer:
    """A trainer whose turns have exactly so many tokens."""
    args = GRPOConfig(
        output_dir=str(folder / factory.__name__), num_generations=GENERATIONS, max_steps=1000, max_turn_tokens=tokens,
        per_device_train_batch_size=GROUPS * GENERATIONS, max_completion_length=TURNS * (tokens + 32),
        vllm_sampling_params=SamplingParams(ignore_eos=True), learning_rate=1e-6, parity_steps=0, disable_tqdm=True,
        save_strategy="no",
    )
    return GRPOTrainer(model, args=args, environment_factory=factory)


def step(trainer: GRPOTrainer) -> tuple[float, float]:
    """Seconds of a rollout and its update, and those in which nothing could be decoded."""
    trainer.clock.restart()
    trainer.update(trainer.rollout())
    waited: Any = trainer.player
    return time.perf_counter() - trainer.clock.started, waited.waited


@click.command(help=__doc__)
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(min=2), help="Of each turn.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Steps of each case.")
@click.option("--engine", default="transformers", show_default=True, type=click.Choice(["transformers", "vllm"]))
@options.output(RESULTS)
def main(tokens: int, rounds: int, engine: str, output: Path) -> None:
    where = machine()
    bare, _ = FastLanguageModel.from_pretrained(
        "tiny", max_seq_length=TURNS * (tokens + 32) + 128, load_in_4bit=False, fast_inference=engine)
    model = FastLanguageModel.get_peft_model(bare, r=8, use_gradient_checkpointing=False)
    found: dict[str, list[tuple[float, float]]] = {"Slow": [], "Quick": []}
    with tempfile.TemporaryDirectory() as folder:
        trainers = {kind.__name__: make(kind, engine, tokens, Path(folder), model) for kind in (Quick, Slow)}
        trainers["Quick"].rollout()  # to warm up
        for number in range(rounds):
            for name in reversed(found) if number % 2 else list(found):
                found[name].append(step(trainers[name]))
    row = {
        "engine": engine, "episodes": GROUPS * GENERATIONS, "turns": TURNS, "tokens": tokens, "rounds": rounds,
        "threads": torch.get_num_threads(), "tool_seconds": SECONDS,
        "ratio": round(median(slow / quick for (slow, _), (quick, _) in zip(*found.values(), strict=True)), 4),
        **{f"{name.lower()}_step": round(median(step for step, _ in found[name]), 4) for name in found},
        **{f"{name.lower()}_waited": round(median(waited for _, waited in found[name]), 4) for name in found},
    }
    append_row(output, row | where)
    console.print(tables.terminal(None, ("engine", "quick step, s", "slow step, s", "ratio", "waited, s"), [[
        engine, *(f"{row[name]:.3f}" for name in ("quick_step", "slow_step", "ratio", "slow_waited"))]]),
        f"target: at most {TARGET:g} times the step whose tools answer at once")


if __name__ == "__main__":
    main()
