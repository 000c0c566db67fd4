"""Measure training with two processes on this machine, and check training under Ray Train.

    OMP_NUM_THREADS=1 python -m bench.ranks scaling
    python -m bench.ranks with-ray

`scaling` measures weak scaling: each rank has as many prompts as the single process, and one thread. Runs of one and of
two ranks alternate; the figure is their ratio of completions per second, and 1.7 is the target on two cores.

`with-ray` installs Ray beside the environment (runs/ray) the first time. Two workers of Ray Train's TorchTrainer train
the embedded model, and the adapter must be that of one process, up to the rounding of float32.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from bench.common import child, options, tables
from bench.common.rows import append_row, in_turn, machine
from lowmem_grpo.trainer.distributed import ranks
from tests.attacks.ranked_run import Ranked, train, trainer

PROMPTS, GENERATIONS, LENGTH, STEPS = 8, 8, 48, 8
RAY = ("ray==2.60.0", "msgpack==1.2.4", "tensorboardX==2.6.5")  # Ray's other dependencies are installed already
SETTINGS = {"max_steps": 4}
ROUNDING = 5e-4  # relative to a matrix's largest weight; another micro-batch size in one process makes up to 2.3e-4
SCALING: dict[str, tables.Figure] = {
    "a step of one, s": ("one_s", ".3f"), "of two, s": ("two_s", ".3f"), "scaling": ("scaling", ".3f"),
    "least": ("least", ".3f"), "most": ("most", ".3f")}


@click.group(help=__doc__)
def main() -> None:
    pass


def result(run: Ranked, longest: float) -> list[Any]:
    """Return what the ranks returned. Raises ClickException if one failed."""
    found = run.wait(longest)
    if not isinstance(found[0], list | tuple):
        raise click.ClickException(f"{run.count} ranks ended with {found[0]}")
    return found


def step_times(folder: Path, rank: int, prompts: int) -> list[float]:
    """Return the seconds of each step except the first two, which set up what later steps reuse."""
    rows = [{"prompt": f"Start with {n}. Add {n + 3}. Multiply by 2. What is the result?\n"} for n in range(1, 65)]
    run = trainer(folder, rows=rows, per_device_train_batch_size=prompts * GENERATIONS, num_generations=GENERATIONS,
                  max_completion_length=LENGTH, max_steps=STEPS, save_strategy="no", preflight=False, beta=0.0)
    run.train()
    return [line["step_time"] for line in run.state.log_history if "loss" in line][2:]


def median_step(count: int) -> float:
    """Return the median seconds of a step in a run of `count` processes."""
    with tempfile.TemporaryDirectory(prefix="lowmem-ranks-") as root:
        return median(result(Ranked(Path(root), count, step_times, prompts=PROMPTS * count), 300)[0])


@main.command()
@click.option("--rounds", "count", default=3, show_default=True, type=click.IntRange(min=1))
@options.output("ranks_scaling")
def scaling(count: int, output: Path) -> None:
    """Compare steps of one process with steps of two with twice the prompts."""
    where = machine()
    taken: dict[int, list[float]] = {1: [], 2: []}
    for processes, _ in in_turn(list(taken), count):
        taken[processes].append(median_step(processes))
    times = [2 * one / two for one, two in zip(*taken.values(), strict=True)]
    row = {"prompts_per_rank": PROMPTS, "generations": GENERATIONS, "tokens": LENGTH, "rounds": count, "ranks": 2,
           "one_s": round(median(taken[1]), 4), "two_s": round(median(taken[2]), 4),
           "scaling": round(median(times), 4), "least": round(min(times), 4), "most": round(max(times), 4)}
    append_row(output, row | where)
    tables.print_rows([row], SCALING)


def work(given: dict[str, Any]) -> None:
    """Train in a worker of Ray."""
    torch.set_num_threads(1)
    folder = Path(given["folder"])
    weights, _ = train(folder / "run", ranks().rank, **SETTINGS)
    torch.save((ranks().count, weights), folder / f"rank-{ranks().rank}.pt")


def start(folder: Path) -> None:
    """Train in two workers of Ray Train. Raises ClickException if they fail."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False)
    torch_trainer = TorchTrainer(work, train_loop_config={"folder": str(folder)},
                                 scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
                                 run_config=RunConfig(storage_path=str(folder / "ray")))
    error = torch_trainer.fit().error
    if error is not None:
        raise click.ClickException(f"Ray Train ended with {error}")


def compare(folder: Path) -> str:
    """Return what is wrong with the adapters that the workers saved, "" if nothing is."""
    ((expected, _),) = Ranked(folder / "one", 1, train, **SETTINGS).wait()
    for rank in range(2):
        count, weights = torch.load(folder / f"rank-{rank}.pt", weights_only=False)
        far = max(float((weights[name] - held).abs().max() / held.abs().max()) for name, held in expected.items())
        if count != 2 or far > ROUNDING:
            return f"rank {rank} of {count} has an adapter that differs by {far:.2g} from that of one process"
    return ""


@main.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path))
def with_ray(folder: Path | None) -> None:
    """Train in two workers of Ray Train and compare with one process."""
    if folder is not None:
        return start(folder)
    root = Path(__file__).resolve().parents[1]
    ray = root / "runs" / "ray"
    child.made_once(ray, [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps",
                          "--target", ray, *RAY])
    path = os.pathsep.join(map(str, (root, ray)))
    with tempfile.TemporaryDirectory(prefix="lowmem-ray-") as name:
        done = subprocess.run([sys.executable, "-m", "bench.ranks", "with-ray", name], cwd=root, check=False, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": path})
        wrong = done.stdout if done.returncode else compare(Path(name))
    if wrong:
        raise click.ClickException(wrong)
    click.echo("two workers of Ray Train have trained the adapter that one process trains")
    return None


if __name__ == "__main__":
    main()
