"""Several runs on one chart."""

from dataclasses import replace

from lowmem_grpo.views.chart import Chart, Line


def comparison(runs: dict[str, list[Chart]]) -> list[Chart]:
    """The charts that any of some runs has, in the order of the first that has it: of each run its first line, under
    the run's name. Evaluations and bands are left out, and so are charts of shares on top of each other."""
    titles = dict.fromkeys(chart.title for charts in runs.values() for chart in charts if not chart.stacked)
    found = [side_by_side(title, runs) for title in titles]
    return [chart for chart in found if chart.lines]


def side_by_side(title: str, runs: dict[str, list[Chart]]) -> Chart:
    """One chart of several runs. Each run keeps its place among the lines, and with it its colour."""
    of_each = {name: next((chart for chart in charts if chart.title == title), None) for name, charts in runs.items()}
    lines = [Line(name, main_line(chart).points if chart else []) for name, chart in of_each.items()]
    first = next(chart for chart in of_each.values() if chart is not None)
    noted = main_line(first).name
    note = first.note if noted in ("", "train") else f"{noted}{', ' * bool(first.note)}{first.note}"
    return replace(first, note=note, metrics={}, lines=lines)


def main_line(chart: Chart) -> Line:
    """What a chart is about: its first curve, or where it has none its first line."""
    return next((line for line in chart.lines if not (line.dots or line.level)), chart.lines[0])
