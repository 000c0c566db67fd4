"""Time one step of DPO or ORPO on the CPU, ours against TRL's, with the same model, LoRA and pairs.

    python -m bench.loop.preference_time

Both run in turn, each time in a fresh process, in float32, each step's pairs in one batch. TRL is that of this
environment (`pip install trl==1.16.0`). `loss` is that of the first step, which must be the same.
"""

import random
import tempfile
import time
from importlib.resources import files
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console

from bench.common import child, options, tables
from bench.common.rows import in_turn, leave, machine, median_ratio, percentiles
from lowmem_grpo.recipes.tasks.arithmetic import problems

OURS, TRL = "lowmem_grpo", "trl"
WARM_UP, LENGTH = 2, 1024  # steps left out; tokens
MODEL = str(files("lowmem_grpo") / "assets" / "tiny")
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHOWN: dict[str, tables.Figure] = {
    "provider": "provider", "shots": "shots", "s / step": ("p50", ".3f"), "TRL / ours": ("ratio", ".2f"),
    "in processor seconds": ("cpu_ratio", ".2f"), "loss": ("loss", ".5f")}
console = Console(width=110)


def pairs(count: int, shots: int) -> list[dict[str, str]]:
    """Return problems with their solution, and with one that has other numbers; `shots` solved ones precede each."""
    digits, drawn = random.Random(0), problems("train", 0)
    solved = [(f"{problem.question}\n", "\n".join([*problem.lines, f"Answer: {problem.answer}"]))
              for problem in islice(drawn, count + shots)]
    before = "".join(f"{question}{lines}\n\n" for question, lines in solved[count:])
    return [{"prompt": before + question, "chosen": lines, "rejected": "".join(
        digits.choice("0123456789") if letter.isdigit() else letter for letter in lines)}
        for question, lines in solved[:count]]


class Times:
    """A callback that takes the times of steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began[0])
        self.cpu_seconds.append(time.process_time() - self.began[1])


def run(provider: str, count: int, steps: int, shots: int, method: str = "DPO") -> dict[str, Any]:
    """Train `steps` steps of `count` pairs; return the times of those after the warm-up."""
    from datasets import Dataset

    rows, times = Dataset.from_list(pairs(count * steps, shots)), Times()
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "output_dir": folder, "per_device_train_batch_size": count, "max_steps": steps, "learning_rate": 1e-4,
            "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none", "save_strategy": "no",
            "gradient_checkpointing": False, "max_length": LENGTH, "disable_tqdm": True}
        trainer = (ours if provider == OURS else trls)(rows, settings, times, method)
        trainer.train()
    return {"seconds": times.seconds[WARM_UP:], "cpu_seconds": times.cpu_seconds[WARM_UP:],
            "loss": trainer.state.log_history[0]["loss"]}


def ours(rows: Any, settings: dict[str, Any], times: Times, method: str = "DPO") -> Any:
    import lowmem_grpo
    from lowmem_grpo import FastLanguageModel

    trainer, config = (getattr(lowmem_grpo, f"{method}{part}") for part in ("Trainer", "Config"))
    model, _ = FastLanguageModel.from_pretrained(MODEL, max_seq_length=LENGTH, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(model, r=16, use_gradient_checkpointing=False)
    args = config(**settings, shuffle_dataset=False, preflight=False)
    return trainer(model, args=args, train_dataset=rows, callbacks=[times])


def trls(rows: Any, settings: dict[str, Any], times: Times, method: str = "DPO") -> Any:
    import trl
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.experimental import orpo

    trainer, config = (getattr(orpo if method == "ORPO" else trl, f"{method}{part}") for part in ("Trainer", "Config"))
    args = config(**settings, train_sampling_strategy="sequential", use_cpu=True, bf16=False)
    return trainer(
        AutoModelForCausalLM.from_pretrained(MODEL, trust_remote_code=False), args=args, train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False),
        peft_config=LoraConfig(r=16, lora_alpha=16, target_modules=LAYERS, task_type="CAUSAL_LM"),
        callbacks=[type("Watched", (TrainerCallback,), {"on_step_begin": times.on_step_begin,
                                                        "on_step_end": times.on_step_end})()])


@click.command(help=__doc__)
@click.option("--method", default="DPO", show_default=True, type=click.Choice(["DPO", "ORPO"]))
@click.option("--shots", multiple=True, default=(0, 4), show_default=True, help="Solved problems in each prompt.")
@click.option("--pairs", "count", default=16, show_default=True, type=click.IntRange(min=1), help="Pairs of a step.")
@click.option("--steps", default=8, show_default=True, type=click.IntRange(min=WARM_UP + 2), help="Steps of one run.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Runs of each.")
@options.output("preference_time")
@options.AS_JSON
def main(method: str, shots: tuple[int, ...], count: int, steps: int, rounds: int, output: Path, as_json: bool) -> None:
    console.stderr = as_json
    where, rows = machine() | {"method": method, "threads": 1, "steps": steps, "pairs": count}, list[dict[str, Any]]()
    for number in shots:
        runs: dict[str, list[dict[str, Any]]] = {OURS: [], TRL: []}
        for provider, _ in in_turn(list(runs), rounds):
            given = {"provider": provider, "count": count, "steps": steps, "shots": number, "method": method}
            found = child.call("bench.loop.preference_time:run", given, settings={"OMP_NUM_THREADS": "1"})
            if "missing" in found:
                raise click.ClickException(f"{found.get('log', '')}\n{provider}: {found['missing']}")
            runs[provider].append(found)
        rows += [row(runs, name) | {"shots": number} | where for name in runs]
    console.print(tables.terminal(f"one {method} step of {count} pairs of the embedded model", list(SHOWN), (
        [tables.cell(one, figure) for figure in SHOWN.values()] for one in rows)))
    for one in rows:
        leave(one, output, as_json)


def row(runs: dict[str, list[dict[str, Any]]], provider: str) -> dict[str, Any]:
    """Return the row to record for one provider; the ratios are TRL's time divided by ours."""
    ratios = {name: round(median_ratio(*([median(found[measure]) for found in runs[who]] for who in (TRL, OURS))), 3)
              for name, measure in (("ratio", "seconds"), ("cpu_ratio", "cpu_seconds"))}
    kept = {name: [value for found in runs[provider] for value in found[name]] for name in ("seconds", "cpu_seconds")}
    return {"provider": provider, **percentiles(kept["seconds"]), "cpu_seconds": percentiles(kept["cpu_seconds"]),
            **ratios, "loss": runs[provider][0]["loss"], "rounds": len(runs[provider]), "warm_up": WARM_UP}


if __name__ == "__main__":
    main()
