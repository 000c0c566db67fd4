"""A run of two workers of Ray Train on this machine: a trainer runs in its TorchTrainer as it is.

    python -m bench.ranks.with_ray

Ray is installed beside the environment (runs/ray) the first time. Its two workers train the embedded model, and the
adapter must be that of one process, up to the rounding of float32.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

PACKAGES = ("ray==2.60.0", "msgpack==1.2.4", "tensorboardX==2.6.5")  # the rest of what it needs is there already
SETTINGS = {"max_steps": 4}
ROUNDING = 5e-4  # of the largest weight of a matrix; another size of micro-batches in one process makes up to 2.3e-4


def installed(folder: Path) -> Path:
    """A folder with Ray, to be found on the path."""
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps",
                        "--target", str(folder), *PACKAGES], check=True)
        (folder / "installed").touch()
    return folder


def work(given: dict[str, Any]) -> None:
    """In a worker."""
    import torch

    from lowmem_grpo.train.distributed import ranks
    from tests.attacks.ranked_run import train

    torch.set_num_threads(1)
    folder = Path(given["folder"])
    adapter, _ = train(folder / "run", ranks().rank, **SETTINGS)
    torch.save((ranks().count, adapter), folder / f"rank-{ranks().rank}.pt")


def start(folder: Path) -> None:
    """Let Ray run two workers."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False)
    trainer = TorchTrainer(work, train_loop_config={"folder": str(folder)},
                           scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
                           run_config=RunConfig(storage_path=str(folder / "ray")))
    error = trainer.fit().error
    if error is not None:
        raise click.ClickException(f"Ray Train ended with {error}")


def compare(folder: Path) -> str:
    """What is wrong with what the workers left; empty where nothing is."""
    import torch

    from tests.attacks.ranked_run import Ranked, train

    ((expected, _),) = Ranked(folder / "one", 1, train, **SETTINGS).wait()
    for rank in range(2):
        count, adapter = torch.load(folder / f"rank-{rank}.pt", weights_only=False)
        far = max(float((adapter[name] - held).abs().max() / held.abs().max()) for name, held in expected.items())
        if count != 2 or far > ROUNDING:
            return f"rank {rank} of {count} has an adapter that differs by {far:.2g} from that of one process"
    return ""


@click.command(help=__doc__)
@click.argument("folder", required=False, type=click.Path(path_type=Path))
def main(folder: Path | None) -> None:
    if folder is not None:
        return start(folder)
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), str(installed(root / "runs" / "ray"))])
    with tempfile.TemporaryDirectory(prefix="lowmem-ray-") as name:
        done = subprocess.run([sys.executable, "-m", "bench.ranks.with_ray", name], cwd=root, check=False, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": path})
        wrong = done.stdout if done.returncode else compare(Path(name))
    if wrong:
        raise click.ClickException(wrong)
    click.echo("two workers of Ray Train have trained the adapter that one process trains")
    return None


if __name__ == "__main__":
    main()
