"""The steps of a run in a bounded number of rows, so that 100,000 are drawn as fast as 1,000."""

from typing import Any

from lowmem_grpo.views.alarm_list import PREFIX, Warned
from lowmem_grpo.views.charts import is_drawn

Record = dict[str, Any]

MOST_STRETCHES = 1000  # each makes two rows: a line has at most 2,000 points
MOST_NAMES = 500  # metrics of a run that are kept
LARGEST = 1e300  # a value beyond cannot be drawn
AVERAGED = ("time/", "episodes/", "reward_std")  # drawn on top of each other, or around another line


class Stretch:
    """Some steps that follow each other: of each metric its lowest and its highest value, and what all are together."""

    def __init__(self, step: int) -> None:
        self.first = self.last = step
        self.low: dict[str, tuple[float, int]] = {}  # value, step
        self.high: dict[str, tuple[float, int]] = {}
        self.sums: dict[str, tuple[float, int]] = {}  # sum, count

    def add(self, step: int, values: dict[str, float]) -> None:
        if step == self.first == self.last:  # an evaluation joins its step; a step that was made again counts anew
            for name, value in values.items():
                self.low[name] = self.high[name] = (value, step)
                self.sums[name] = (value, 1)
            return
        self.first, self.last = min(self.first, step), max(self.last, step)
        for name, value in values.items():
            if name not in self.low or value < self.low[name][0]:
                self.low[name] = (value, step)
            if name not in self.high or value > self.high[name][0]:
                self.high[name] = (value, step)
            total, count = self.sums.get(name, (0.0, 0))
            self.sums[name] = (total + value, count + 1)

    def join(self, other: "Stretch") -> None:
        """Take another one's steps."""
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        for name, (total, count) in other.sums.items():
            mine = self.sums.get(name, (0.0, 0))
            self.sums[name] = (mine[0] + total, mine[1] + count)
            self.low[name] = min(self.low.get(name, other.low[name]), other.low[name])
            self.high[name] = max(self.high.get(name, other.high[name]), other.high[name])

    def rows(self) -> list[Record]:
        """A row of its first step and one of its last. Each metric has its lowest and its highest value in them, in the
        order in which these came, or its mean in both where means are drawn."""
        if self.first == self.last:
            return [{"step": self.first, **{name: value for name, (value, _) in self.low.items()}}]
        first: Record = {"step": self.first}
        last: Record = {"step": self.last}
        for name, (total, count) in self.sums.items():
            ends = sorted((self.low[name], self.high[name]), key=lambda end: end[1])
            mean = total / count
            first[name], last[name] = (mean, mean) if name.startswith(AVERAGED) else (ends[0][0], ends[1][0])
        return [first, last]


class Series:
    """The rows of a run. As long as there are at most `MOST_STRETCHES` steps, each has its own; later two rows stand
    for the steps of a stretch, so that no spike is lost. The newest step is always there as it is."""

    def __init__(self) -> None:
        self.width, self.steps = 1, 0
        self.stretches: dict[int, Stretch] = {}
        self.newest: Record = {"step": -1}
        self.drawn: dict[str, bool] = {}  # the names that came so far
        self.warned: dict[str, Warned] = {}

    def add(self, record: Record) -> None:
        """A line of metrics.jsonl; one with a step that is there joins it."""
        step, values = record["step"], {}
        for name, value in record.items():
            if type(value) in (int, float) and abs(value) < LARGEST and self.is_kept(name):
                values[name] = float(value)
                if value and name.startswith(PREFIX):
                    alarm = name.removeprefix(PREFIX)
                    self.warned[alarm] = self.warned.get(alarm, Warned(0, step, step)).again(step)
        if step > self.newest["step"]:
            self.steps += 1
            self.newest = {"step": step}
        if step == self.newest["step"]:
            self.newest |= values
        place = step // self.width
        if place not in self.stretches:
            self.stretches[place] = Stretch(step)
        self.stretches[place].add(step, values)
        while len(self.stretches) > MOST_STRETCHES:
            self.widen()

    def is_kept(self, name: str) -> bool:
        """Whether a metric is shown anywhere."""
        if name not in self.drawn and len(self.drawn) < MOST_NAMES:
            self.drawn[name] = is_drawn(name) or name.startswith(PREFIX)
        return self.drawn.get(name, False) and name != "step"

    def widen(self) -> None:
        """Twice as many steps to a stretch."""
        self.width *= 2
        held, self.stretches = self.stretches, {}
        for stretch in held.values():
            place = stretch.first // self.width
            if place in self.stretches:
                self.stretches[place].join(stretch)
            else:
                self.stretches[place] = stretch

    def rows(self) -> list[Record]:
        """The rows, in the order of the steps; the last is the newest step."""
        rows = [row for place in sorted(self.stretches) for row in self.stretches[place].rows()]
        if rows:
            rows[-1] = dict(self.newest)
        return rows
