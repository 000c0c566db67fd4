"""Tables for a terminal and for a page in Markdown, from the same columns and rows."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.common.rows import leave

Rows = Iterable[Sequence[str]]
Row = dict[str, Any]
# a field of a row, its format and its divisor; or a function that makes the cell
Figure = str | tuple[str, str] | tuple[str, str, int] | Callable[[Row], str]
Columns = dict[str, Figure]
ALWAYS = ("case", "shape", "recipe", "provider", "machine", "commit")  # columns that rows without figures have too


def terminal(title: str | None, columns: Sequence[str], rows: Rows, **options: Any) -> Table:
    """Return a table for rich; `options` are those of `rich.table.Table`."""
    table = Table(*columns, title=title, **options)
    for row in rows:
        table.add_row(*row)
    return table


def markdown(columns: Sequence[str], rows: Rows) -> list[str]:
    """Return the lines of a table in Markdown, the header first."""
    return [line(columns), f"|{'---|' * len(columns)}", *map(line, rows)]


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(row: dict[str, Any], name: str, form: str, divisor: int = 1) -> str:
    """Return a measure of a row, divided by `divisor`; "" if the row lacks it."""
    value = row.get(name)
    return "" if value is None else f"{value if divisor == 1 else value / divisor:{form}}"


def cell(row: Row, figure: Figure) -> str:
    """Return a field of a row as it is, as a formatted number, or as a function makes it of the row."""
    if callable(figure):
        return figure(row)
    return str(row.get(figure, "")) if isinstance(figure, str) else number(row, *figure)


def cells(row: Row, columns: Columns) -> list[str]:
    """Return the cells of a row. If the row has no figures, the first of their cells says why."""
    if not row.get("missing"):
        return [cell(row, figure) for figure in columns.values()]
    figures = iter([f"missing: {row['missing'].replace('|', '/')[:80]}", *[""] * len(columns)])
    return [cell(row, figure) if name in ALWAYS else next(figures) for name, figure in columns.items()]


def page(rows: Iterable[Row], columns: Columns) -> list[str]:
    """Return the lines of a table of rows in Markdown."""
    return markdown(list(columns), (cells(row, columns) for row in rows))


def on_card(row: Row) -> bool:
    """Return whether this row was measured on a GPU; a machine may have one and not use it."""
    return bool(row.get("gpu")) and row.get("device") != "cpu"


def place(row: Row) -> str:
    """Return the machine of a row."""
    return str(row["gpu"]) if on_card(row) else f"{row['cpu']}, {row['cores']} cores"


def measure_each(names: Iterable[str], run: Callable[[str], Row], row_of: Callable[[str, Row], Row], columns: Columns,
                 output: Path, as_json: bool = False) -> None:
    """Measure one provider after the other, leave a row of each at once, and print the rows with figures and why others
    have none. Raises ClickException in the end if one of ours failed; a peer's failure is a reason."""
    rows, failed, console = list[Row](), list[str](), Console(width=180, stderr=as_json)
    for name in names:
        click.echo(f"{name} ...", err=True)
        found = run(name)
        rows.append(row_of(name, found))
        leave(rows[-1], output, as_json)
        if "missing" in found:
            click.echo(found.get("log") or found["missing"], err=True)
        if found.get("failed") and not is_peer(name):
            failed.append(name)
    console.print(terminal(None, list(columns), (cells(row, columns) for row in rows if not row.get("missing"))))
    for row in rows:
        if row.get("missing"):
            why = f"  {row['provider']} is missing: {row['missing']}"
            console.print(why, style="dim", highlight=False, markup=False)
    if failed:
        raise click.ClickException(f"{', '.join(failed)} failed; see above")


def is_peer(provider: str) -> bool:
    """Return whether a provider is not one of our engines, so that it need not run here."""
    return not provider.startswith(("lowmem_grpo", "transformers"))


def print_rows(rows: Iterable[dict[str, Any]], columns: Columns, *words: str, **options: Any) -> None:
    """Print rows as a table with these columns, then `words`; `options` are those of `rich.table.Table`."""
    title = options.pop("title", None)
    Console(width=130).print(terminal(title, list(columns), (cells(row, columns) for row in rows), **options), *words)
