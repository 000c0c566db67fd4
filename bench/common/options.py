"""Command line options that several benchmarks share, and their defaults by machine."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import click

from bench.common.rows import RESULTS
from bench.rollout.shapes import SHAPES

DEVICE = click.option("--device", type=click.Choice(["cpu", "cuda"]), help="The card if there is one, else the CPU.")
SHAPE = click.option("--shape", type=click.Choice(list(SHAPES)), help="full on a card, tiny on the CPU.")
PROMPTS = click.option("--prompts", default=1, show_default=True, type=click.IntRange(min=1), help="Prompts of a step.")
THREADS = click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1), help="On the CPU.")
WEIGHTS = click.option(
    "--weights", "--workdir", "weights", type=click.Path(file_okay=False, path_type=Path),
    help="A folder where random weights are made once and kept (16 GB for the 8B shape); by default a temporary one.")
RUN = click.option("--run", "run_name", help="Joins the rows of several calls: providers of one run are compared.")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print rows, one JSON object a line; append none.")


def output(name: str) -> Any:
    """Return the option --output: the file to which rows are appended, by default NAME.jsonl in bench/results."""
    path = RESULTS / f"{name}.jsonl"
    return click.option("--output", default=path, type=click.Path(dir_okay=False, path_type=Path), show_default=True)


def names(allowed: Collection[str]) -> Callable[..., list[str]]:
    """Return a callback for an option that takes names separated by commas; click.BadParameter for an unknown one."""
    def check(_context: Any, _option: Any, value: str | None) -> list[str]:
        chosen = [name.strip() for name in value.split(",")] if value else []
        if wrong := [name for name in chosen if name not in allowed]:
            raise click.BadParameter(f"{', '.join(wrong)}; choose from {', '.join(allowed)}")
        return chosen

    return check


def place(device: str | None, shape: str | None, gpu: str | None) -> tuple[str, str]:
    """Return device and shape; for None the card if there is one, and the full shape on a card, else the tiny one."""
    device = device or ("cuda" if gpu else "cpu")
    return device, shape or ("full" if device == "cuda" else "tiny")
