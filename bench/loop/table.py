"""Rows of the loop benchmark on the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common import tables
from lowmem_grpo.units import GIB

PHASES = ("generate", "switch", "score", "train", "optimizer", "rest")  # as shares are shown
PEAKS = ("used_bytes", "allocated_bytes", "host_bytes")


def show(rows: list[dict[str, Any]]) -> None:
    """A line for each provider, then the memory of each phase, then what is missing."""
    console = Console(width=150)
    for one in (times(rows), memory(rows)):
        console.print(one)
    for row in rows:
        if row.get("missing"):
            line = f"  {row['provider']} is missing: {row['missing']}"
            console.print(line, style="dim", highlight=False, markup=False)


def times(rows: list[dict[str, Any]]) -> Table:
    """Seconds of a step, shares of its phases, tokens a second."""
    columns = ("provider", "s / step", *PHASES, "tokens/s: step", "generate", "train")
    return tables.terminal(title_of(rows[0]), columns, (
        [row["provider"], f"{row['seconds']:.3f}", *(f"{row['shares'].get(name, 0):.1%}" for name in PHASES),
         *(f"{row['tokens_per_second'].get(name, 0):.0f}" for name in ("step", "generate", "train"))]
        for row in measured(rows)))


def memory(rows: list[dict[str, Any]]) -> Table:
    """Peaks of each phase in GiB: in use on the card, allocated by torch, resident on the host; what was planned."""
    columns = ("provider", "GiB", *PHASES, "planned: rollout", "training", "host")
    return tables.terminal("peaks of memory", columns, (
        [row["provider"], measure.removesuffix("_bytes"), *(gib(row[measure].get(phase)) for phase in PHASES),
         *(gib(row.get("planned", {}).get(name)) for name in ("rollout_bytes", "train_bytes", "host_bytes"))]
        for row in measured(rows) for measure in PEAKS if measure in row))


def measured(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if not row.get("missing")]


def gib(value: float | None) -> str:
    return "" if not value else f"{value / GIB:.2f}"


def title_of(row: dict[str, Any]) -> str:
    cap = f", {row['gib']:g} GiB" if row["gib"] else ""
    where = row["gpu"] if row["device"] == "cuda" else row["cpu"]
    return (f"{row['shape']}: {row['prompts']} x {row['generations']} completions of {row['completion_tokens']} tokens "
            f"after {row['prompt_tokens']}, {where}{cap}")
