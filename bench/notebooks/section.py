"""The part of RESULTS.md about public notebooks."""

from typing import Any

from bench.common.rows import newest
from bench.common.tables import markdown

COLUMNS = ("notebook", "steps", "cells", "changed", "time", "verdict")
Row = dict[str, Any]


def notebooks_table(rows: list[Row]) -> list[str]:
    """The newest row of each notebook."""
    last = latest(rows)
    return ["", "## Public notebooks with imports, model, dataset and steps replaced", "",
            f"{told(last)}. `tokens`: `return_dict=False`, which transformers 5 needs. `device`: the CPU in place of a card. "
            "`login`: no login to the hub.", "", *markdown(COLUMNS, map(line, last))]


def told(last: list[Row]) -> str:
    """How many notebooks ran, and how many of them because transformers gives token ids again."""
    done = [row for row in last if ran(row)]
    helped = sum("tokens" in row["changes"] for row in done)
    return f"{len(done)} of {len(last)} ran to their end, {helped} of them with `return_dict=False`"


def latest(rows: list[Row]) -> list[Row]:
    """The newest row of each notebook, by name."""
    return sorted(newest(rows, "notebook").values(), key=lambda row: str(row["notebook"]))


def ran(row: Row) -> bool:
    """Whether every cell ran and something was trained."""
    return "error" not in row and sum(row["steps"]) > 0


def line(row: Row) -> list[str]:
    """The cells of a notebook's line in the table."""
    where = f"cell {row['failed_cell']}: " if "failed_cell" in row else ""
    verdict = "runs" if ran(row) else where + row.get("error", "it trains nothing").replace("|", "/")[:160]
    changed = ", ".join(f"{count} {kind}" for kind, count in sorted(row.get("changes", {}).items()))
    return [row["notebook"], " + ".join(map(str, row["steps"])) or "-", str(row.get("cells", "")), changed,
            f"{row['seconds']:.0f} s" if "seconds" in row else "", verdict]
