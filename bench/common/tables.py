"""Tables of the same columns and rows for a terminal and for a page in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Rows = Iterable[Sequence[str]]
Figure = str | tuple[str, str] | tuple[str, str, int]  # a field of a row, how it is printed, what it is divided by


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


def cell(row: dict[str, Any], figure: Figure) -> str:
    """Return a field of a row as it is, or as a number in its form."""
    return str(row.get(figure, "")) if isinstance(figure, str) else number(row, *figure)


def print_missing(rows: Iterable[dict[str, Any]], console: Console) -> None:
    """Print why providers left no figures."""
    for row in rows:
        if row.get("missing"):
            line = f"  {row['provider']} is missing: {row['missing']}"
            console.print(line, style="dim", highlight=False, markup=False)


def print_rows(rows: Iterable[dict[str, Any]], columns: dict[str, Figure], *words: str, **options: Any) -> None:
    """Print rows as a table with these columns, then some words; `options` are those of `rich.table.Table`."""
    title, cells = options.pop("title", None), ([cell(row, figure) for figure in columns.values()] for row in rows)
    Console(width=130).print(terminal(title, list(columns), cells, **options), *words)
