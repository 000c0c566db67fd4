"""Does the full stack learn? A model taught on this machine, then the recipes arithmetic and countdown on it.

    python -m bench.learner.bench                            # on a card: 25 M parameters, about ten minutes
    python -m bench.learner.bench --recipes countdown        # one recipe, in less than ten minutes; keeps the model
    python -m bench.learner.bench --device cpu --size tiny   # everything once, in a minute; learns nothing
    python -m bench.learner.bench --device cpu --size small  # 0.9 M parameters: does it learn without a card?
    python -m bench.learner.bench --picture                  # only draws docs/card_learning.svg from the rows

First, a small Qwen2 learns both tasks from scratch, from generated demonstrations with planted mistakes. Then each
recipe runs on it as a user would run it, in a process of its own: NF4 weights, LoRA, activations on the host, packed
micro-batches, and on a card vLLM with CUDA graphs. Each recipe leaves one row. The exit code is 1 where a part fails,
or where accuracy on held-out problems does not rise by two standard errors on a card (unless the model is tiny).
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from bench.common import options
from bench.common.rows import append_row, machine, read_rows
from bench.gate.pretend import environment, is_pretend
from bench.learner.picture import draw, shown
from bench.learner.sizes import PUZZLES, SIZES, read_lesson, settings

HERE = Path(__file__).resolve().parents[1]
RESULTS, PICTURE = HERE / "results" / "card_learning.jsonl", HERE.parent / "docs" / "card_learning.svg"
RECIPES = {"arithmetic": {}, "countdown": PUZZLES}
STACK = {"load_in_4bit": "true", "gradient_checkpointing_mode": "offload", "max_seq_length": 256,
         "max_completion_length": 64, "save_strategy": "no", "overwrite_output_dir": "true", "disable_tqdm": "true"}
ERRORS = 2.0  # standard errors of the difference that accuracy must rise by


def fresh(command: list[str], device: str, gpu: str | None, seconds: float | None = None) -> str | None:
    """Run a process to its end. Returns its last words where it failed or took too long."""
    values = os.environ | environment(gpu) | {"TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        values |= {"CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(command, cwd=HERE.parent, env=values, stderr=subprocess.PIPE, text=True,
                              timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"took longer than {seconds:.0f} s"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        click.echo("\n".join(lines[-25:]), err=True)
        return lines[-1] if lines else f"exit code {done.returncode}"
    return None


def pretrain(size: str, device: str, gpu: str | None, seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """Make the learner in `folder`, unless it is there: what its training gave, or `missing`."""
    command = [sys.executable, "-m", "bench.learner.pretrain", "--size", size, "--device", device, "--seconds",
               str(seconds), "--seed", str(seed), "--out", str(folder)]
    failed = fresh(command, device, gpu)
    lesson = None if failed else read_lesson(folder, settings(size, seconds, seed))
    return lesson or {"missing": f"no model to train: {failed}"}


def recipe_command(name: str, model: Path, run: Path, engine: str, size: str, seed: int) -> list[str]:
    """The command that a user would type."""
    given = {"model": model, "output_dir": run, "engine": engine, "seed": seed, **STACK, **SIZES[size].recipe,
             **RECIPES[name]}
    return [sys.executable, "-m", "lowmem_grpo", "run", name, *(f"{key}={value}" for key, value in given.items())]


def measure(name: str, model: Path, engine: str, common: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run one recipe: its curve, accuracies and peak memory; if it fails, why, and the curve up to there."""
    run = model.parent / f"{name}-{common['size']}"
    shutil.rmtree(run, ignore_errors=True)  # an earlier run's curve must not be taken for this one's
    command = recipe_command(name, model, run, engine, common["size"], common["seed"])
    started = time.perf_counter()
    failed = fresh(command, common["device"], common["gpu"], seconds)
    found = curve(run / "metrics.jsonl") | {"command_seconds": time.perf_counter() - started}
    if failed:
        return found | {"missing": failed}
    summary = json.loads((run / "summary.json").read_text())
    names = ("accuracy_before", "accuracy_after", "eval_problems", "steps", "train_seconds")
    return found | {key: summary[key] for key in names}


def curve(path: Path) -> dict[str, Any]:
    """Rewards and lengths step by step, peak memory, and the worst agreement of sampler and trainer."""
    steps = [line for line in read_rows(path) if "reward" in line]
    return {
        "rewards": [line["reward"] for line in steps], "lengths": [line["completions/mean_length"] for line in steps],
        "peak_bytes": max((line.get("memory/peak_bytes", 0) for line in steps), default=0),
        "parity": max((line.get("sampling/parity/mean", 0.0) for line in steps), default=0.0),
    }


def noise(row: dict[str, Any]) -> float:
    """Standard error of the difference between a row's two accuracies."""
    shares = (row["accuracy_before"], row["accuracy_after"])
    return sum(share * (1 - share) / row["eval_problems"] for share in shares) ** 0.5


def verdict(row: dict[str, Any]) -> tuple[bool, str]:
    """Whether a row is good, and its line."""
    if "missing" in row:
        return False, f"{row['recipe']}: {row['missing']}"
    before, after, least = row["accuracy_before"], row["accuracy_after"], ERRORS * noise(row)
    line = f"{row['recipe']}: {before:.1%} -> {after:.1%} of {row['eval_problems']} held-out problems"
    if row["size"] == "tiny" or is_pretend(row["gpu"]):
        return True, f"{line}; nothing can be learnt here, so nothing is expected"
    if after - before > least:
        return True, f"{line}, noise {least:.1%}"
    judged = row["device"] == "cuda"
    return not judged, f"{line}: no rise beyond noise ({least:.1%})" + ("" if judged else "; judged only on a card")


@click.command(help=__doc__)
@options.DEVICE
@click.option("--size", type=click.Choice(list(SIZES)), help="full on a card, tiny on the CPU.")
@click.option("--recipes", default=",".join(RECIPES), show_default=True, callback=options.names(RECIPES))
@click.option("--engine", type=click.Choice(["vllm", "transformers"]), help="vllm on a card, transformers on the CPU.")
@click.option("--time-limit", default=180.0, show_default=True, type=click.FloatRange(min=1),
              help="Most seconds of pretraining; the learning rate falls to 0 by then.")
@click.option("--recipe-limit", default=300.0, show_default=True, type=click.FloatRange(min=1),
              help="Most seconds of one recipe, loading included.")
@click.option("--seed", default=0, show_default=True)
@click.option("--workdir", "--weights", type=click.Path(file_okay=False, path_type=Path),
              default=Path("runs") / "card_learner", show_default=True,
              help="Folder for the model and the runs; a model with the same settings is used again.")
@options.output(RESULTS)
@click.option("--picture", "drawing", is_flag=True, help="Only draw docs/card_learning.svg from --output.")
def main(
    device: str | None, size: str | None, recipes: list[str], engine: str | None, time_limit: float,
    recipe_limit: float, seed: int, workdir: Path, output: Path, drawing: bool,
) -> None:
    if drawing:
        draw(shown(read_rows(output)), PICTURE)
        click.echo(f"wrote {PICTURE}")
        return
    about = machine()
    device, size = options.place(device, size, about["gpu"])
    engine = engine or ("vllm" if device == "cuda" else "transformers")
    model = workdir.resolve() / f"model-{size}"
    lesson = pretrain(size, device, about["gpu"], time_limit, seed, model)
    common = {"size": size, "device": device, "engine": engine, "load_in_4bit": True, "seed": seed,
              **{name: value for name, value in lesson.items() if name != "settings"}, **about}
    good = True
    for name in recipes:
        found = {} if "missing" in lesson else measure(name, model, engine, common, recipe_limit)
        row = {"recipe": name, **common, **found}
        append_row(output, row)
        fine, line = verdict(row)
        click.echo(line)
        good &= fine
    sys.exit(not good)


if __name__ == "__main__":
    main()
