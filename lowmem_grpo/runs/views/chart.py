"""A chart: metrics over the steps of a run, how its lines are smoothed, and the points that a page draws."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

FEWEST_TO_SMOOTH = 20  # steps


@dataclass(frozen=True)
class Line:
    """One metric: (step, value) of each step that logged it."""

    name: str
    points: list[tuple[int, float]]
    edges: list[tuple[float, float]] = field(default_factory=list)  # low and high around each point
    dots: bool = False  # measured now and then: dots, and edges are intervals; otherwise a curve, and edges are a band
    level: bool = False  # the same value at all steps, to compare with: dashed


@dataclass(frozen=True)
class Chart:
    """Metrics drawn over the steps of the run, each under its name in the legend."""

    title: str
    note: str
    axis: str  # what the vertical axis counts
    metrics: dict[str, str] = field(default_factory=dict)
    scale: float = 1.0
    share: bool = False  # in percent, from 0
    stacked: bool = False
    from_zero: bool = False
    smooth: bool = True
    lines: list[Line] = field(default_factory=list)

    def to_dict(self, most: int) -> dict[str, Any]:
        """Return what the page's script draws: at most `most` points of a line."""
        lines = stacked(self.lines, 1.0 if self.share else float("inf")) if self.stacked else self.lines
        named = len(lines) > 1 or not self.metrics  # where the title is not the name
        return {"title": self.title, "note": self.note, "axis": self.axis, "share": self.share, "keys": named,
                "zero": self.from_zero or self.share or self.stacked,
                "lines": [line_data(self, line, most) for line in lines]}


def stacked(lines: Sequence[Line], most: float) -> list[Line]:
    """Return the lines on top of each other, at most up to `most`: the edges of each are where it begins and ends."""
    floor: dict[int, float] = {}
    stack = []
    for line in lines:
        edges = [(floor.get(step, 0.0), min(most, floor.get(step, 0.0) + value)) for step, value in line.points]
        floor |= {step: high for (step, _), (_, high) in zip(line.points, edges, strict=True)}
        stack.append(replace(line, edges=edges))
    return stack


def line_data(chart: Chart, line: Line, most: int) -> dict[str, Any]:
    """Return a line as it is drawn: its points, `bold` where it is smoothed, `low` and `high` for the edges."""
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
    """Return at most `most` of the places 0 to `count` - 1, evenly spaced, with the first and the last."""
    return list(range(count)) if count <= most else [place * (count - 1) // (most - 1) for place in range(most)]


def telling_places(points: Sequence[tuple[float, float]], most: int) -> list[int]:
    """Return at most `most` places: each stretch's lowest and highest point, so that no spike is lost, and the last."""
    if len(points) <= most:
        return list(range(len(points)))
    half = max(1, (most - 1) // 2)
    edges = [place * len(points) // half for place in range(half + 1)]
    ends = {choose(range(start, end), key=lambda place: points[place][1])
            for start, end in pairwise(edges) for choose in (min, max)}
    return sorted(ends | {len(points) - 1})


def window(steps: int) -> int:
    """Return how many steps a point of a smoothed line is the mean of; 1 where there are too few to smooth."""
    return 1 if steps < FEWEST_TO_SMOOTH else 2 * max(2, round(steps / 30)) + 1


def smooth(values: list[float], around: int) -> list[float]:
    """Return each value's mean with as many neighbours on both sides as there are, at most `around`."""
    return [fmean(values[max(0, place - around) : place + around + 1]) for place in range(len(values))]


def smoothed(chart: Chart, line: Line) -> Line:
    """Return the bold line of a curve, with its band; the same line where it is not to be smoothed."""
    around = window(len(line.points)) // 2
    if not chart.smooth or line.dots or line.level or not around:
        return line
    values = smooth([value for _, value in line.points], around)
    edges = zip(*(smooth([pair[side] for pair in line.edges], around) for side in (0, 1)), strict=True)
    return replace(line, points=[(step, value) for (step, _), value in zip(line.points, values, strict=True)],
                   edges=list(edges))


def how_smoothed(charts: Iterable[Chart]) -> str:
    """Return what bold and faint mean, in words; empty where nothing is smoothed."""
    lines = [line for chart in charts if chart.smooth for line in chart.lines if not (line.dots or line.level)]
    widest = max((window(len(line.points)) for line in lines), default=1)
    return f"Bold lines are means of the {widest} steps around each, faint ones are single steps." if widest > 1 else ""
