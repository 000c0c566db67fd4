"""Run unchanged recipes of tinker-cookbook against `lowmem-grpo serve` with the model in the package.

    python -m bench.cookbook

A supervised recipe, two of reinforcement learning (arithmetic with right answers, and shorter answers by a pairwise
preference), and on-policy distillation, whose teacher is what the supervised one saved. They run in a separate
environment (runs/cookbook), made the first time, because the cookbook needs an older transformers. Each must finish and
save its weights; the supervised loss and the reverse KL to the teacher must fall, and sampler and trainer must agree on
log-probabilities, as the recipes measure them (`optim/kl_sample_train_v2`).
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from bench.common import child
from lowmem_grpo.server.server_dir import Address, read_address

# torch as it is here: another build would bring gigabytes of CUDA packages where there is no card
PACKAGES = ("tinker==0.38.0", "tinker-cookbook==0.5.8", "sympy", "pylatexenc", "math-verify")
# without tml-renderers, which it requires: not every Python has one, and these recipes do not import it
NEWEST = ("--no-deps", "tinker-cookbook==0.6.1")
MODEL = str(files("lowmem_grpo") / "assets" / "tiny")
AGREE = 1e-3  # limit of the mean squared difference of log-probabilities, which recipes print as 0 here
STEPS, PROMPTS = 6, 8  # of the distillation
DATASET = "zwhe99/DeepMath-103K"  # the distillation's: a folder of this name has prompts in its place
STARTS = 400.0  # seconds within which the server must be up
Rows = list[dict[str, Any]]


def loss_falls(rows: Rows) -> str:
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    return "" if len(losses) == 4 and losses[-1] < losses[0] else f"the losses of its 4 steps were {losses}"


def sampler_agrees(rows: Rows) -> str:
    found = [row["optim/kl_sample_train_v2"] for row in rows if "optim/kl_sample_train_v2" in row]
    return "" if found and max(map(abs, found)) < AGREE else f"sampler and trainer differed by {found}"


def of_module(module: str, *settings: str, steps: int = 2, rate: float = 1e-3) -> Callable[[str, Path], list[str]]:
    """Return the function that makes the command of a recipe in the cookbook's module."""
    return lambda url, folder: ["-m", f"tinker_cookbook.recipes.{module}", f"model_name={MODEL}",
                                "renderer_name=role_colon", f"log_path={folder}", "behavior_if_log_dir_exists=delete",
                                "eval_every=0", f"learning_rate={rate}", f"max_steps={steps}", *settings]


def distilled(url: str, folder: Path) -> list[str]:
    """Return the command of the distillation. Every step has the same prompts, so the KL can be compared."""
    prompts = folder.parent / DATASET / "train.jsonl"
    prompts.parent.mkdir(parents=True, exist_ok=True)
    prompts.write_text("".join(json.dumps({"question": f"What is {number} + 2?"}) + "\n"
                               for _ in range(STEPS) for number in range(PROMPTS)))
    last = (folder.with_name("supervised") / "checkpoints.jsonl").read_text().splitlines()[-1]
    recipe = of_module("distillation.on_policy_distillation", "dataset=deepmath", f"groups_per_batch={PROMPTS}",
                       "group_size=16", "max_tokens=24", f"teacher_model={MODEL}",
                       f"teacher_checkpoint={json.loads(last)['sampler_path']}", steps=STEPS, rate=2e-4)
    return recipe(url, folder)


def teacher_is_approached(rows: Rows) -> str:
    found = [row["teacher_kl"] for row in rows if "teacher_kl" in row]
    falls = len(found) == STEPS and sum(found[-2:]) < 0.7 * sum(found[:2])
    return "" if falls else f"the reverse KL to the teacher was {found}"


SCRIPT = Path(__file__).with_name("cookbook_supervised.py")
RECIPES = {  # name: the command for a url and a folder, and a check of the rows that it logs, "" if they are right
    "supervised": (lambda url, folder: [str(SCRIPT), MODEL, url, str(folder)], loss_falls),
    "math_rl": (of_module("math_rl.train", "env=arithmetic", "group_size=4", "groups_per_batch=8",
                          "loss_fn=importance_sampling"), sampler_agrees),
    "preference.shorter": (of_module("preference.shorter.train", "batch_size=4", "group_size=4", "max_tokens=24"),
                           sampler_agrees),
    "distillation": (distilled, teacher_is_approached),
}


def environment(folder: Path) -> Path:
    """Return the Python of an environment with the cookbook."""
    import torch

    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    child.made_once(folder, [sys.executable, "-m", "venv", folder],
                    [*install, f"torch=={torch.__version__.partition('+')[0]}"], [*install, *PACKAGES],
                    [*install, *NEWEST])
    return python


@contextmanager
def served(folder: Path) -> Iterator[Address]:
    """Run a server of the model in the package; yield its address."""
    shutil.rmtree(folder, ignore_errors=True)
    server = subprocess.Popen([sys.executable, "-m", "lowmem_grpo", "serve", "--port", "0", "--folder", str(folder),
                               "--model", MODEL, "--16bit", "--max-seq-length", "256"])
    try:
        until = time.monotonic() + STARTS
        while not (folder / "server.json").exists():
            if server.poll() is not None or time.monotonic() > until:
                raise click.ClickException("the server did not come up")
            time.sleep(0.1)
        yield read_address(folder)
    finally:
        server.terminate()
        server.wait()


def tried(name: str, python: Path, address: Address, folder: Path) -> str:
    """Run a recipe; return what went wrong, "" if nothing did."""
    words, wrong = RECIPES[name]
    given = {"TINKER_BASE_URL": address.url, "TINKER_API_KEY": address.key, "HF_HUB_OFFLINE": "1"}
    shutil.rmtree(folder, ignore_errors=True)
    done = subprocess.run([str(python), *words(address.url, folder)], env=os.environ | given, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, cwd=folder.parent)
    if done.returncode != 0:
        return f"it ended with {done.returncode}: {done.stdout[-1500:]}"
    if "tinker://" not in (folder / "checkpoints.jsonl").read_text():
        return "it saved no weights"
    return wrong([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])


@click.command(help=__doc__)
@click.option("--folder", type=click.Path(path_type=Path), default=Path("runs/cookbook"), show_default=True)
def main(folder: Path) -> None:
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    python, failed = environment(folder / "venv"), False
    with served(folder / "server") as address:
        for name in RECIPES:
            began = time.monotonic()
            problem = tried(name, python, address, folder / name)
            failed |= bool(problem)
            click.echo(f"{name}: {problem or 'came to its end'} ({time.monotonic() - began:.0f} s)")
    sys.exit(failed)


if __name__ == "__main__":
    main()
