"""Time a step in which complete groups are trained while others are sampled, against one without that.

    OMP_NUM_THREADS=1 python -m bench.loop.overlap [--engine vllm] [--mixture chains]

The model in the package samples 32 prompts 8 times. In the mixture "noise" the completions are noise (the temperature
is high, the model's last norm is halved, a few arbitrary tokens end them): their lengths have a long tail. In "chains"
it answers 30 short problems and two that take several times as long, at temperature 1, until it stops by itself. The
cases take turns, after warm-up steps, and sample with the same seeds; the learning rate is zero, so that one case's
steps do not change the samples of the others. `ratio` is the median over rounds of a case's step time
divided by that of the step without the switch, `share` the completions that were trained before all were sampled.
"""

import random
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
import torch

from bench.common import options, tables
from bench.common.rows import append_row, in_turn, machine, median_ratio
from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer, SamplingParams
from lowmem_grpo.recipes.arithmetic import make_dataset

CASES: dict[str, dict[str, Any]] = {
    "off": {}, "in turn": {"train_while_sampling": True}, "parallel": {"train_while_sampling": "parallel"},
}
GENERATIONS, ENDING = 8, range(300, 304)  # completions of a prompt; tokens that end one
HOT, FLAT = 2.0, 0.5  # temperature (the most that vLLM takes); a further factor of the logits
LONG, LONG_CHAIN, SHORT_CHAIN = 2, 16, 2  # long chains among 32; operations of a long and of a short one
TARGETS = "target: at most 0.85 times the step without the switch"
SHOWN: dict[str, tables.Figure] = {"case": "case", "step, s": ("step", ".3f"), "x off": ("ratio", ".3f"),
                                   "trained early": ("share", ".0%"), "longest": "longest"}


class Case:
    """A setting, and the measures of its steps."""

    def __init__(self, name: str, trainer: GRPOTrainer) -> None:
        self.name, self.trainer = name, trainer
        self.steps: list[float] = []
        self.shares: list[float] = []
        self.lengths: list[int] = []

    def step(self, measured: bool) -> None:
        """Make one rollout and its update."""
        began = time.perf_counter()
        groups = self.trainer.rollout()
        metrics = self.trainer.update(groups)
        if measured:
            self.steps.append(time.perf_counter() - began)
            self.shares.append(metrics.get("train_while_sampling/share", 0.0))
            self.lengths += [len(rollout.completion_ids) for group in groups for rollout in group.rollouts]

    def row(self, off: "Case", settings: dict[str, Any]) -> dict[str, Any]:
        """Return the row to record, compared with the case without the switch."""
        return {"case": self.name, "step": round(median(self.steps), 4), "share": round(fmean(self.shares), 3),
                "ratio": median_ratio(self.steps, off.steps), "mean_length": round(fmean(self.lengths), 1),
                "longest": max(self.lengths), **settings}


def pays(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return rewards that differ between the completions of a prompt."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def noise(prompts: int) -> tuple[list[dict[str, Any]], SamplingParams]:
    """Return the rows and the sampling parameters of the mixture "noise"."""
    return make_dataset("train", 64 * prompts), SamplingParams(stop_token_ids=list(ENDING), temperature=HOT)


def chains(prompts: int) -> tuple[list[dict[str, Any]], SamplingParams]:
    """Return those of "chains": in each epoch, which is a step, a 16th of the problems (at least one) are long."""
    draw, few = random.Random(0), max(1, LONG * prompts // 32)
    texts = [chain(LONG_CHAIN if number < few else SHORT_CHAIN, draw) for number in range(prompts)]
    return [{"prompt": [{"role": "user", "content": text}], "answer": ""} for text in texts], SamplingParams()


def chain(steps: int, draw: random.Random) -> str:
    """Return a problem of `steps` operations."""
    kinds = ("Add {}.", "Subtract {}.", "Multiply by {}.")
    said = [draw.choice(kinds).format(draw.randint(2, 9)) for _ in range(steps)]
    return " ".join([f"Start with {draw.randint(1, 20)}.", *said, "What is the result?"])


MIXTURES = {"noise": noise, "chains": chains}


def make_cases(mixture: str, engine: str, prompts: int, tokens: int, folder: Path) -> list[Case]:
    """Return a case for each setting, whose trainers share one model."""
    bare, _ = FastLanguageModel.from_pretrained(
        "tiny", max_seq_length=tokens + 256, load_in_4bit=False, fast_inference=engine
    )
    if mixture == "noise":
        with torch.no_grad():
            bare.get_submodule("model.norm").weight.mul_(FLAT)  # type: ignore[operator]
    model = FastLanguageModel.get_peft_model(bare, r=16, use_gradient_checkpointing=False)
    rows, ends = MIXTURES[mixture](prompts)
    shared: dict[str, Any] = {
        "num_generations": GENERATIONS, "max_steps": 1000, "per_device_train_batch_size": 64,
        "gradient_accumulation_steps": prompts * GENERATIONS // 64, "max_completion_length": tokens,
        "loss_type": "dapo", "learning_rate": 0.0, "temperature": ends.temperature, "vllm_sampling_params": ends,
        "parity_steps": 0, "disable_tqdm": True, "save_strategy": "no", "score_while_sampling": True,
    }
    return [Case(name, GRPOTrainer(model, pays, GRPOConfig(
        output_dir=str(folder / name), **shared, **switch), rows)) for name, switch in CASES.items()]


@click.command(help=__doc__)
@click.option("--engine", default="transformers", show_default=True, type=click.Choice(["transformers", "vllm"]))
@click.option("--mixture", default="noise", show_default=True, type=click.Choice(list(MIXTURES)))
@click.option("--prompts", default=32, show_default=True, type=click.IntRange(min=8))
@click.option("--tokens", default=256, show_default=True, type=click.IntRange(min=2), help="Of a completion at most.")
@click.option("--rounds", "count", default=5, show_default=True, type=click.IntRange(min=1), help="Steps of each case.")
@click.option("--warm", default=1, show_default=True, type=click.IntRange(min=1), help="Steps before those.")
@options.output("overlap")
def main(engine: str, mixture: str, prompts: int, tokens: int, count: int, warm: int, output: Path) -> None:
    """Measure all cases in turn."""
    where = machine()
    settings = {"engine": engine, "mixture": mixture, "prompts": prompts, "generations": GENERATIONS, "tokens": tokens,
                "rounds": count, "threads": torch.get_num_threads()}
    with tempfile.TemporaryDirectory() as folder:
        cases = make_cases(mixture, engine, prompts, tokens, Path(folder))
        for case, counts in in_turn(cases, count, warm):
            case.step(counts)
    rows = [case.row(cases[0], settings) for case in cases]
    for found in rows:
        append_row(output, found | where)
    tables.print_rows(rows, SHOWN, TARGETS)


if __name__ == "__main__":
    main()
