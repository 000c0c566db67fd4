"""A chart as a small inline SVG, whose colours are the page's own: light, dark, or on paper.

It is what paper and a browser without scripts show; elsewhere the page's script draws `hover_data` in its place.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from lowmem_grpo.views.axes import Axis
from lowmem_grpo.views.chart import Chart, Line, smoothed
from lowmem_grpo.views.palette import LINES

WIDTH, HEIGHT = 360, 210  # units of the drawing, about as many pixels on a page
TOP, RIGHT, BOTTOM = 8, 12, 36
TITLE, CHARACTER = 27, 6.3  # room for the title of the vertical axis, and for a character of its labels
MOST_POINTS = 240  # of a line: more cannot be told apart
MARKED = 30  # a line with fewer points marks each of them, unless it is smoothed
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Frame:
    """Where the axes lie in the drawing."""

    steps: Axis
    values: Axis
    left: float

    def x(self, step: float) -> float:
        return self.left + (step - self.steps.low) / (self.steps.high - self.steps.low) * (WIDTH - RIGHT - self.left)

    def y(self, value: float) -> float:
        share = (value - self.values.low) / (self.values.high - self.values.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    def path(self, points: Points) -> str:
        """The points as SVG writes them."""
        return " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in points)


def frame_of(chart: Chart) -> Frame:
    steps, values = chart.axes()
    return Frame(steps, values, TITLE + CHARACTER * max(len(label) for _, label in values.ticks))


def drawing(chart: Chart, most: int = MOST_POINTS) -> str:
    """The chart as an SVG element; a line has at most about `most` points."""
    frame = frame_of(chart)
    parts = [axes(frame, chart.axis)]
    if chart.stacked:
        parts += areas(frame, chart.lines, most, 1.0 if chart.share else math.inf)
    else:
        parts += [curve(frame, chart, line, f"l{place % len(LINES)}", most) for place, line in enumerate(chart.lines)]
    return (f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}, by step">'
            f'{"".join(parts)}</svg>')


def axes(frame: Frame, title: str) -> str:
    """Grid lines, ticks with their labels, and the titles of both axes."""
    bottom, middle = HEIGHT - BOTTOM, (HEIGHT - BOTTOM + TOP) / 2
    grid = "".join(
        f'<line class="grid" x1="{frame.left:.1f}" x2="{WIDTH - RIGHT}" y1="{frame.y(at):.1f}" y2="{frame.y(at):.1f}"/>'
        f'<text class="ytick" x="{frame.left - 8:.1f}" y="{frame.y(at) + 3.5:.1f}">{label}</text>'
        for at, label in frame.values.ticks
    )
    ticks = "".join(f'<text class="xtick" x="{frame.x(at):.1f}" y="{bottom + 14}">{label}</text>'
                    for at, label in frame.steps.ticks)
    return (f'{grid}{ticks}<text class="xtitle" x="{(frame.left + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 5}">step</text>'
            f'<text class="ytitle" transform="translate(11 {middle}) rotate(-90)">{escape(title)}</text>')


def curve(frame: Frame, chart: Chart, line: Line, css: str, most: int) -> str:
    """One metric: dots with their intervals, or a line in its band, bold over faint where it is smoothed."""
    if line.dots:
        return dots(frame, line, css)
    if line.level:
        return polyline(frame, [line.points[0], line.points[-1]], f"{css} level")
    bold = smoothed(chart, line)
    drawn = band(frame, bold, css, most)
    if bold is not line:
        drawn += polyline(frame, spiked(line.points, most), f"{css} faint")
    elif len(line.points) < MARKED:
        drawn += "".join(circle(frame, *point, css, 2) for point in line.points)
    return drawn + polyline(frame, thinned(bold.points, most), css)


def polyline(frame: Frame, points: Points, css: str) -> str:
    return f'<polyline class="{css}" points="{frame.path(points)}"/>'


def circle(frame: Frame, step: float, value: float, css: str, radius: float) -> str:
    return f'<circle class="{css}" cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" r="{radius}"/>'


def band(frame: Frame, line: Line, css: str, most: int) -> str:
    """What lies between the edges of a line."""
    if not line.edges:
        return ""
    steps = [step for step, _ in line.points]
    lower, upper = (thinned([(step, pair[side]) for step, pair in zip(steps, line.edges, strict=True)], most)
                    for side in (0, 1))
    return f'<polygon class="{css} band" points="{frame.path([*lower, *reversed(upper)])}"/>'


def dots(frame: Frame, line: Line, css: str) -> str:
    """A dot for each measurement, its interval through it, and a thin line through more than two."""
    bars = "".join(polyline(frame, [(step, low), (step, high)], css)
                   for (step, _), (low, high) in zip(line.points, line.edges, strict=False))
    joined = polyline(frame, line.points, f"{css} joined") if len(line.points) > 2 else ""
    return (joined + bars + "".join(circle(frame, *point, css, 3.5) for point in line.points))


def areas(frame: Frame, lines: Sequence[Line], most: int, whole: float) -> list[str]:
    """Parts on top of each other, at most up to the `whole`."""
    parts, floor = [], dict.fromkeys((step for line in lines for step, _ in line.points), 0.0)
    for place, line in enumerate(lines):
        lower = [(step, floor[step]) for step, _ in line.points]
        upper = [(step, min(whole, floor[step] + value)) for step, value in line.points]
        floor |= dict(upper)
        outline = [*thinned(lower, most), *reversed(thinned(upper, most))]
        parts.append(f'<polygon class="l{place % len(LINES)} area" points="{frame.path(outline)}"/>')
    return parts


def thinned(points: Points, most: int) -> list[tuple[float, float]]:
    """At most `most` of the points, evenly spaced, with the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[place * (len(points) - 1) // (most - 1)] for place in range(most)]


def spiked(points: Points, most: int) -> list[tuple[float, float]]:
    """At most about `most` of the points: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    edges = [place * len(points) // (most // 2) for place in range(most // 2 + 1)]
    stretches = [points[start:end] for start, end in pairwise(edges)]
    return [point for stretch in stretches for point in sorted({lowest(stretch, min), lowest(stretch, max)})]


def lowest(points: Points, choose: Callable[..., tuple[float, float]]) -> tuple[float, float]:
    return choose(points, key=lambda point: point[1])


def hover_data(chart: Chart, most: int = MOST_POINTS) -> dict[str, Any]:
    """What the page's script draws, in plain numbers: a line has at most about `most` points."""
    found = [line_data(chart, line, most) for line in chart.lines]
    return {"title": chart.title, "axis": chart.axis, "share": chart.share, "stacked": chart.stacked,
            "zero": chart.from_zero or chart.share, "lines": [lines for lines, _ in found],
            "more": [more for _, more in found]}


def line_data(chart: Chart, line: Line, most: int) -> tuple[list[Any], dict[str, Any]]:
    """A line as name, steps and values; and how it is drawn: its smoothed values, and the edges around it."""
    bold = smoothed(chart, line)
    places = even(len(line.points), most) if chart.stacked else telling(line.points, most)
    more: dict[str, Any] = {"kind": "dots" if line.dots else "level" if line.level else "curve"}
    if bold is not line:
        more["bold"] = [short(bold.points[place][1]) for place in places]
    if bold.edges:
        more |= {name: [short(bold.edges[place][side]) for place in places if place < len(bold.edges)]
                 for side, name in enumerate(("low", "high"))}
    steps, values = [line.points[place][0] for place in places], [short(line.points[place][1]) for place in places]
    return [line.name, steps, values], more


def short(value: float) -> float:
    """A value with as many digits as a chart can show."""
    return float(f"{value:.4g}")


def even(count: int, most: int) -> list[int]:
    """At most `most` of the places 0 to `count` - 1, evenly spaced, with the first and the last."""
    return list(range(count)) if count <= most else [place * (count - 1) // (most - 1) for place in range(most)]


def telling(points: Points, most: int) -> list[int]:
    """Those of the lowest and the highest point of each stretch, so that no spike is lost, and the last; at most
    `most`."""
    if len(points) <= most:
        return list(range(len(points)))
    half = max(1, (most - 1) // 2)
    edges = [place * len(points) // half for place in range(half + 1)]
    found = {choose(range(start, end), key=lambda place: points[place][1])
             for start, end in pairwise(edges) for choose in (min, max)}
    return sorted(found | {len(points) - 1})
