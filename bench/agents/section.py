"""The part of RESULTS.md about public programs of ART."""

from typing import Any

from bench.common.rows import newest
from bench.common.tables import markdown

COLUMNS = ("program", "steps", "trajectories trained", "changed", "time", "verdict")
Row = dict[str, Any]


def agents_table(rows: list[Row]) -> list[str]:
    """The newest row of each program."""
    last = sorted(newest(rows, "program").values(), key=lambda row: str(row["program"]))
    told = f"{sum(map(ran, last))} of {len(last)} ran to their end"
    return ["", "## Public programs of ART with import, backend, model and steps replaced", "",
            f"{told}. `backend`: statements that copy a run to S3, left out.", "", *markdown(COLUMNS, map(line, last))]


def ran(row: Row) -> bool:
    """Whether it ran to its end and something was trained."""
    return "error" not in row and row["steps"] > 0


def line(row: Row) -> list[str]:
    """The cells of a program's line in the table."""
    where = f"cell {row['failed_cell']}: " if "failed_cell" in row else ""
    verdict = "runs" if ran(row) else where + row.get("error", "it trains nothing").replace("|", "/")[:160]
    changed = ", ".join(f"{count} {kind}" for kind, count in sorted(row.get("changes", {}).items()))
    return [row["program"], str(row["steps"]), f"{row.get('trained', 0):,} of {row.get('total', 0):,}", changed,
            f"{row['seconds']:.0f} s" if "seconds" in row else "", verdict]
