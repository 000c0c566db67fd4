"""The jobs of a server, as a table on the terminal."""

import time
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowmem_grpo.units import size_text, time_text
from lowmem_grpo.views.console import any_console

STYLES = {"running": "green", "stopping": "yellow", "done": "dim", "failed": "red", "waiting": "cyan"}


def show_jobs(jobs: list[dict[str, Any]], console: Console | None = None) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("job", "state", "recipe", "for", "needs", "why"):
        table.add_column(name, justify="right" if name == "job" else "left", overflow="fold")
    for job in jobs:
        recipe = " ".join([job["recipe"], *job["options"]])
        state = Text(job["state"], style=STYLES.get(job["state"], ""))
        # what others wrote is text, and not markup
        table.add_row(str(job["id"]), state, Text(recipe), time_text(lasted(job)), needs(job), Text(job["why"]))
    (console or any_console()).print(table)


def lasted(job: dict[str, Any]) -> float:
    until = job["ended"] or time.time()
    began = job["began"] if job["began"] and job["state"] != "waiting" else job["came"]
    return max(0.0, float(until - began))


def needs(job: dict[str, Any]) -> str:
    share = "" if job["share"] == 1 else f"{job['share']:.0%}"
    peak = "" if job["peak_bytes"] is None else size_text(job["peak_bytes"])
    return ", ".join(filter(None, (share, peak))) or "the card"
