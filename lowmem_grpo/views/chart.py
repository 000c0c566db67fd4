"""A chart: metrics over the steps of a run, and how its lines are smoothed. `svg` and `pictures` draw it."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import fmean

from lowmem_grpo.views.axes import Axis, step_axis, value_axis

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

    def sums(self) -> dict[int, float]:
        """What the lines come to in each step."""
        found: dict[int, float] = {}
        for line in self.lines:
            for step, value in line.points:
                found[step] = found.get(step, 0.0) + value
        return found

    def axes(self) -> tuple[Axis, Axis]:
        """Of the steps, and of the values."""
        steps = [step for line in self.lines for step, _ in line.points]
        values = [value for line in self.lines for _, value in line.points]
        values += [edge for line in self.lines for pair in line.edges for edge in pair]
        if self.stacked:
            values = [0.0, 1.0 if self.share else max(self.sums().values())]
        return step_axis(min(steps), max(steps)), value_axis(values, self.from_zero, self.share)


def window(steps: int) -> int:
    """How many steps a point of a smoothed line is the mean of; 1 where there are too few to smooth."""
    return 1 if steps < FEWEST_TO_SMOOTH else 2 * max(2, round(steps / 30)) + 1


def smooth(values: list[float], around: int) -> list[float]:
    """Each value's mean with as many neighbours on both sides as there are, at most `around`."""
    return [fmean(values[max(0, place - around) : place + around + 1]) for place in range(len(values))]


def smoothed(chart: Chart, line: Line) -> Line:
    """The bold line of a curve, with its band; the same line where it is not to be smoothed."""
    around = window(len(line.points)) // 2
    if not chart.smooth or line.dots or line.level or not around:
        return line
    values = smooth([value for _, value in line.points], around)
    edges = zip(*(smooth([pair[side] for pair in line.edges], around) for side in (0, 1)), strict=True)
    return replace(line, points=[(step, value) for (step, _), value in zip(line.points, values, strict=True)],
                   edges=list(edges))


def widest_window(charts: Iterable[Chart]) -> int:
    """How many steps a point of these charts is at most the mean of; 1 where nothing is smoothed."""
    lines = [line for chart in charts if chart.smooth for line in chart.lines if not (line.dots or line.level)]
    return max((window(len(line.points)) for line in lines), default=1)


def how_smoothed(charts: Iterable[Chart]) -> str:
    """What bold and faint mean, in words; empty where nothing is smoothed."""
    widest = widest_window(charts)
    return f"Bold lines are means of the {widest} steps around each, faint ones are single steps." if widest > 1 else ""
