"""A picture of the learner's runs: mean reward step by step, and accuracy before and after in words."""

from pathlib import Path
from typing import Any

import click

from bench.common.pictures import panels, save
from bench.common.rows import newest
from bench.gate.pretend import is_pretend
from lowmem_grpo.views.chart import smooth
from lowmem_grpo.views.palette import LINES

SMOOTH = 2  # steps on both sides that a point of the thick line is the mean of


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows for the picture: the newest finished run of each recipe on a real machine, of the largest model; a card
    wins over a CPU. ClickException where there is none."""
    whole = [row for row in rows if "missing" not in row and not is_pretend(row["gpu"])]
    if not whole:
        raise click.ClickException("there is nothing to draw: no run on a real machine has finished")
    largest = max(whole, key=lambda row: (row["device"] == "cuda", row["parameters"]))
    kept = [row for row in whole if all(row[name] == largest[name] for name in ("device", "parameters"))]
    return list(newest(kept, "recipe").values())


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel for each row; the rows are of one model on one machine."""
    figure, axes = panels(len(rows), 4.6 * len(rows), 3.4)
    for axis, row in zip(axes, rows, strict=True):
        panel(axis, row)
    first = rows[0]
    where = first["gpu"] if first["device"] == "cuda" else first["cpu"]
    title = f"{first['parameters'] / 1e6:.1f} M parameters, NF4, {first['engine']}, {where}"
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    save(figure, path)


def panel(axis: Any, row: dict[str, Any]) -> None:
    """One recipe: the rewards as they were, and smoothed."""
    rewards = row["rewards"]
    steps = range(1, len(rewards) + 1)
    axis.plot(steps, rewards, color=LINES[0], linewidth=1, alpha=0.35)
    axis.plot(steps, smooth(rewards, SMOOTH), color=LINES[0], linewidth=2.2)
    axis.set_ylim(0, 1.05 * max(1.0, *rewards))
    axis.grid(axis="y", alpha=0.4)
    axis.set_title(f"{row['recipe']}: mean reward of {len(rewards)} steps", loc="left")
    axis.set_ylabel(f"reward (bold: mean of {2 * SMOOTH + 1} steps)")
    axis.set_xlabel("optimizer step\n"
                    f"held out: {row['accuracy_before']:.1%} before, {row['accuracy_after']:.1%} after\n"
                    f"{row['train_seconds']:.0f} s of training", loc="left")
