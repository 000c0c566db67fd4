"""A profile in words: for the terminal, and as a page that can be kept."""

from typing import Any

from rich.console import Console
from rich.table import Table

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
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 3]}..."


def show(title: str, summary: Summary, of_ops: bool) -> None:
    """The profile as tables on the terminal."""
    console = Console(width=150)
    numbers = Table("", "", title=title)
    for fact in facts(summary, of_ops):
        numbers.add_row(*fact)
    top = Table("op" if of_ops else "kernel", "calls", "ms", "share", title="most time")
    for one in summary.top:
        top.add_row(short(one.name), str(one.calls), ms(one.microseconds), f"{one.share:.1%}")
    gaps = Table("ms", "the CPU ran", title="longest idle times")
    for gap in summary.gaps:
        gaps.add_row(ms(gap.duration), short(gap.during))
    for one in (numbers, top, gaps):
        console.print(one, markup=False)


def page(title: str, row: dict[str, Any], summary: Summary, of_ops: bool) -> str:
    """The same as Markdown, with the machine that it was made on."""
    where = row["gpu"] if row["device"] == "cuda" else row["cpu"]
    lines = [f"# {title}", "", f"{where}; commit {row['commit']}, {row['date']}; torch {row['versions'].get('torch')}."]
    lines += [] if not row.get("note") else ["", row["note"]]
    lines += ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts(summary, of_ops))]
    lines += ["", "| most time | calls | ms | share |", "|---|---|---|---|"]
    lines += [f"| `{cell(one.name)}` | {one.calls} | {ms(one.microseconds)} | {one.share:.1%} |" for one in summary.top]
    lines += ["", "| longest idle times, ms | the CPU ran |", "|---|---|"]
    lines += [f"| {ms(gap.duration)} | {cell(gap.during)} |" for gap in summary.gaps]
    return "\n".join(lines) + "\n"


def cell(name: str) -> str:
    return short(name).replace("|", "/").replace("`", "'")
