"""`Chart`: metrics over the steps of a run, with smoothing, and downsampled to the points that a page draws."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

FEWEST_TO_SMOOTH = 20  # steps


@dataclass(frozen=True)
class Line:
    """A line of a chart: a metric's (step, value) for each step that logged it."""

    name: str
    points: list[tuple[int, float]]
    edges: list[tuple[float, float]] = field(default_factory=list)  # low and high around each point
    dots: bool = False  # dots with `edges` as intervals, for rare measurements; else a curve with `edges` as a band
    level: bool = False  # a constant baseline, drawn dashed


@dataclass(frozen=True)
class Chart:
    """A chart of metrics over the steps of a run; `metrics` maps each metric to its name in the legend."""

    title: str
    note: str
    axis: str  # label of the vertical axis
    metrics: dict[str, str] = field(default_factory=dict)
    scale: float = 1.0
    share: bool = False  # in percent, with the axis from 0
    stacked: bool = False
    from_zero: bool = False
    smooth: bool = True
    lines: list[Line] = field(default_factory=list)

    def to_dict(self, most: int) -> dict[str, Any]:
        """Return the data for the page's script, with at most `most` points per line."""
        lines = stacked(self.lines, 1.0 if self.share else float("inf")) if self.stacked else self.lines
        named = len(lines) > 1 or not self.metrics  # a single line is named by the title
        return {"title": self.title, "note": self.note, "axis": self.axis, "share": self.share, "keys": named,
                "zero": self.from_zero or self.share or self.stacked,
                "lines": [line_data(self, line, most) for line in lines]}


def stacked(lines: Sequence[Line], most: float) -> list[Line]:
    """Stack the lines up to a height of `most`: each line's edges become its lower and upper bound."""
    floor: dict[int, float] = {}
    stack = []
    for line in lines:
        edges = [(floor.get(step, 0.0), min(most, floor.get(step, 0.0) + value)) for step, value in line.points]
        floor |= {step: high for (step, _), (_, high) in zip(line.points, edges, strict=True)}
        stack.append(replace(line, edges=edges))
    return stack


def line_data(chart: Chart, line: Line, most: int) -> dict[str, Any]:
    """Return a line's data: its points, `bold` if it is smoothed, `low` and `high` if it has edges."""
    bold = smoothed(chart, line)
    places = even_places(len(line.points), most) if chart.stacked else telling_places(line.points, most)
    kind = "dots" if line.dots else "level" if line.level else "area" if chart.stacked else "curve"
    columns = {"values": [value for _, value in line.points]}
    if bold is not line:
        columns["bold"] = [value for _, value in bold.points]
    if bold.edges:
        columns |= {name: [edge[side] for edge in bold.edges] for side, name in enumerate(("low", "high"))}
    return {"name": line.name, "kind": kind, "steps": [line.points[place][0] for place in places],
            **{name: [float(f"{values[place]:.4g}") for place in places] for name, values in columns.items()}}


def even_places(count: int, most: int) -> list[int]:
    """Return at most `most` of the indices 0 to `count` - 1, evenly spaced, with the first and the last."""
    return list(range(count)) if count <= most else [place * (count - 1) // (most - 1) for place in range(most)]


def telling_places(points: Sequence[tuple[float, float]], most: int) -> list[int]:
    """Return at most `most` indices: each interval's lowest and highest point, so that spikes stay, and the last."""
    if len(points) <= most:
        return list(range(len(points)))
    half = max(1, (most - 1) // 2)
    edges = [place * len(points) // half for place in range(half + 1)]
    ends = {choose(range(start, end), key=lambda place: points[place][1])
            for start, end in pairwise(edges) for choose in (min, max)}
    return sorted(ends | {len(points) - 1})


def window(steps: int) -> int:
    """Return the number of steps that a smoothed point averages; 1 if there are too few steps to smooth."""
    return 1 if steps < FEWEST_TO_SMOOTH else 2 * max(2, round(steps / 30)) + 1


def smooth(values: list[float], around: int) -> list[float]:
    """Return the moving average over up to `around` neighbours on each side."""
    return [fmean(values[max(0, place - around) : place + around + 1]) for place in range(len(values))]


def smoothed(chart: Chart, line: Line) -> Line:
    """Return the smoothed line with its band; the same object if the line is not smoothed."""
    around = window(len(line.points)) // 2
    if not chart.smooth or line.dots or line.level or not around:
        return line
    values = smooth([value for _, value in line.points], around)
    edges = zip(*(smooth([pair[side] for pair in line.edges], around) for side in (0, 1)), strict=True)
    return replace(line, points=[(step, value) for (step, _), value in zip(line.points, values, strict=True)],
                   edges=list(edges))


def how_smoothed(charts: Iterable[Chart]) -> str:
    """Return a sentence that explains bold and faint lines; empty if no line is smoothed."""
    lines = [line for chart in charts if chart.smooth for line in chart.lines if not (line.dots or line.level)]
    widest = max((window(len(line.points)) for line in lines), default=1)
    return f"Bold lines are means of the {widest} steps around each, faint ones are single steps." if widest > 1 else ""
