"""The folder of a model with random weights: made once, and used again by every benchmark that names the same place."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import click

from bench.common import child
from bench.rollout.shapes import SHAPES

MADE = "adapter/adapter_model.safetensors"  # the file that is written last


@contextmanager
def model_folder(weights: Path | None, shape: str, device: str) -> Iterator[Path]:
    """Yield a folder with random weights of `shape` and an adapter, which are made on the device if they do not exist.

    They stay in `weights`; if that is None, they are in a temporary folder, which is removed at the end.
    """
    temporary = tempfile.TemporaryDirectory(prefix="random_") if weights is None else nullcontext(weights)
    with temporary as name:
        folder = Path(name)
        if (folder / MADE).exists():
            check(folder, shape)
        elif (made := child.call("bench.rollout.provider:make",
                                 {"folder": folder, "shape": shape, "device": device})).get("failed"):
            raise click.ClickException(f"the weights could not be made:\n{made['log']}\n{made['missing']}")
        yield folder


def check(folder: Path, shape: str) -> None:
    """Raise ClickException if the folder holds another model."""
    found = json.loads((folder / "config.json").read_text())
    other = [f"{name} {found.get(name)}, wanted {size}" for name, size in SHAPES[shape].config.items()
             if found.get(name) != size]
    if other:
        raise click.ClickException(f"{folder} holds another model ({other[0]}); name another folder for shape {shape}")
