"""Tables of the same columns and rows for a terminal and for a page in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

Rows = Iterable[Sequence[str]]


def terminal(title: str | None, columns: Sequence[str], rows: Rows, **options: Any) -> Table:
    """A table for rich; `options` are those of `rich.table.Table`."""
    table = Table(*columns, title=title, **options)
    for row in rows:
        table.add_row(*row)
    return table


def markdown(columns: Sequence[str], rows: Rows) -> list[str]:
    """The lines of a table in Markdown, the header first."""
    return [line(columns), f"|{'---|' * len(columns)}", *map(line, rows)]


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def missing(reason: str, cells: int) -> list[str]:
    """The cells of a row without figures: the first says why."""
    return [f"missing: {reason.replace('|', '/')[:80]}", *[""] * (cells - 1)]


def number(row: dict[str, Any], name: str, form: str, divisor: int = 1) -> str:
    """A measure of a row, divided by `divisor`; nothing where the row lacks it."""
    value = row.get(name)
    return "" if value is None else f"{value if divisor == 1 else value / divisor:{form}}"
