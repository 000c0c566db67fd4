"""Charts of metrics over a run's steps, smoothed and downsampled, and the colours of charts, pages and pictures.
Colours of lines and verdicts are distinguishable with each kind of colour blindness, on light and dark pages. Memory
components are too many for that; they appear in the order of their legend."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

FEWEST_TO_SMOOTH = 20  # steps
LINES = ("#0065d2", "#e8500c", "#0c9c65", "#7c2150", "#8d9a3c", "#49506c")  # on a light page, in this order
DARK_LINES = ("#4d94ff", "#f07a28", "#2fe0b0", "#f79be8", "#e0ee80", "#858779")
RIGHT, WRONG = "#00856f", "#cc4a0c"  # readable on white and on black, since a terminal may be either
DARK_RIGHT, DARK_WRONG = "#3ecfae", "#ff8a5c"
RIGHT_SIGN, WRONG_SIGN = "\u2713", "\u2717"
INK, PALE = "#1f2733", "#d0d7de"  # text, and grid lines behind the data, on a light page

PAGE = {  # (light, dark)
    "page": ("#f6f7f9", "#12161c"), "card": ("#ffffff", "#1a2029"), "ink": (INK, "#dde3ea"),
    "quiet": ("#5c6675", "#9aa5b3"), "edge": ("#e0e4ea", "#2b333e"), "right": (RIGHT, DARK_RIGHT),
    "wrong": (WRONG, DARK_WRONG),
    **{f"line{place}": pair for place, pair in enumerate(zip(LINES, DARK_LINES, strict=True))},
}

# The model in blue, LoRA in green, token-dependent memory in warm colours, the driver in grey.
MEMORY = {
    "weights": "#2f5d9b", "embedding": "#6f9bd1", "head": "#a9c6e8", "adapters": "#2e8b57", "gradients": "#6cbf8b",
    "optimizer": "#b5dfc0", "KV cache": "#e0803a", "engine workspace": "#c98bbf", "layer inputs": "#c0504d",
    "layer recompute": "#e0803a", "MLP tile": "#f0b67f", "U and hidden states": "#f6d55c", "logits chunk": "#d9a441",
    "attention workspace": "#8f6bb3", "adapter copy": "#1f6b43", "sampling weights": "#4a3f9b",
    "vision tower": "#3d7ea6", "image features": "#e6a57e", "trained copies": "#5fa36a", "matrix gradient": "#93d1a5",
    "CUDA context": "#8a8f98", "reserve": "#c4c8ce",
}


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
    ends = {choose(range(start, end), key=lambda place: points[place][1])
            for start, end in intervals(len(points), max(1, (most - 1) // 2)) for choose in (min, max)}
    return sorted(ends | {len(points) - 1})


def intervals(length: int, count: int) -> list[tuple[int, int]]:
    """Return (start, end) of `count` intervals of about the same size, which make up the indices 0 to `length` - 1."""
    return list(pairwise(place * length // count for place in range(count + 1))) if count else []


def window(steps: int) -> int:
    """Return the number of steps that a smoothed point averages; 1 if there are too few steps to smooth."""
    return 1 if steps < FEWEST_TO_SMOOTH else 2 * max(2, round(steps / 30)) + 1


def smooth(values: list[float], around: int) -> list[float]:
    return [fmean(values[max(0, place - around) : place + around + 1]) for place in range(len(values))]


def smoothed(chart: Chart, line: Line) -> Line:
    """Return the smoothed line with its band. Return `line` itself if it is not to be smoothed."""
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


def css() -> str:
    """Return the colours as CSS variables. A page of the class `paper` is always light."""
    light, dark = (";".join(f"--{name}:{pair[place]}" for name, pair in PAGE.items()) for place in (0, 1))
    return f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root:not(.paper){{{dark}}}}}\n"


def verdict_text(right: bool) -> str:
    return f"{RIGHT_SIGN} right" if right else f"{WRONG_SIGN} wrong"
