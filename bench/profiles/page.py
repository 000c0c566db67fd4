"""A profile in words: for the terminal, and as a page that can be kept."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from bench.common import tables
from bench.profiles.timeline import Summary

NAME_LENGTH = 90  # characters of a kernel's name that are shown


def facts(summary: Summary, of_ops: bool) -> list[tuple[str, str]]:
    """The numbers of a profile and what they are called."""
    work = "ops" if of_ops else "kernels"
    overlap = summary.copy_overlap
    copies = "none" if overlap is None else f"{ms(summary.copy)} ms, {overlap:.1%} of it under {work}"
    return [
        ("steps looked at", str(summary.steps)),
        (f"from the first of the {work} to the last", f"{ms(summary.span)} ms"),
        ("a step", f"{ms(summary.span / summary.steps)} ms"),
        (f"idle: no {work} running", f"{ms(summary.span - summary.busy)} ms, {summary.idle_share:.1%}"),
        (f"{work} a step", f"{summary.kernels / summary.steps:,.0f}"),
        ("calls of ops a step" if of_ops else "launches a step (a graph is one)",
         f"{summary.launches / summary.steps:,.0f}"),
        ("copies between host and device", copies),
    ]


def ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:,.3f}"


def short(name: str) -> str:
    """A name that fits into a table, without a character that ends a cell or code in Markdown."""
    name = name.replace("|", "/").replace("`", "'")
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 3]}..."


def show(title: str, summary: Summary, of_ops: bool) -> None:
    """The profile as tables on the terminal."""
    console = Console(width=150)
    for columns, rows in parts(summary, of_ops):
        console.print(tables.terminal(title, [escape(name) for name in columns],
                                      ([escape(cell) for cell in row] for row in rows)))


def parts(summary: Summary, of_ops: bool) -> list[tuple[tuple[str, ...], list[Sequence[str]]]]:
    """Columns and rows of the three tables: numbers, what took the most time, the longest idle times."""
    return [
        (("", ""), list(facts(summary, of_ops))),
        (("most time", "calls", "ms", "share"), [
            (f"`{short(one.name)}`", str(one.calls), ms(one.microseconds), f"{one.share:.1%}") for one in summary.top]),
        (("longest idle times, ms", "the CPU ran"), [(ms(gap.duration), short(gap.during)) for gap in summary.gaps]),
    ]


def page(title: str, row: dict[str, Any], summary: Summary, of_ops: bool) -> str:
    """The same as Markdown, with the machine that it was made on."""
    where = row["gpu"] if row["device"] == "cuda" else row["cpu"]
    lines = [f"# {title}", "", f"{where}; commit {row['commit']}, {row['date']}; torch {row['versions'].get('torch')}."]
    lines += [] if not row.get("note") else ["", row["note"]]
    for columns, rows in parts(summary, of_ops):
        lines += ["", *tables.markdown(columns, rows)]
    return "\n".join(lines) + "\n"
