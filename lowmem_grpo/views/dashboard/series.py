"""The steps of a run in a bounded number of rows, so that 100,000 are drawn as fast as 1,000."""

from statistics import fmean
from typing import Any

from lowmem_grpo.views.alarm_list import PREFIX, Warned, count_alarms
from lowmem_grpo.views.charts import is_drawn
from lowmem_grpo.views.samples import LARGEST

Record = dict[str, Any]

MOST_ROWS = 1600
MOST_NAMES = 500  # metrics of a run that are kept
AVERAGED = ("time/", "episodes/", "reward_std")  # drawn on top of each other, or around another line


class Series:
    """The rows of a run. As long as there are few steps, each has its own; later two rows stand for the steps of a
    stretch, so that no spike is lost. The newest steps are always there as they are."""

    def __init__(self) -> None:
        self.width, self.steps = 1, 0  # steps that a row stands for, and all
        self.old: list[Record] = []
        self.new: list[Record] = []  # steps of the stretch that is not full yet
        self.names: dict[str, bool] = {}  # that came so far, and whether they are kept
        self.warned: dict[str, Warned] = {}

    def add_record(self, record: Record) -> None:
        """Take a line of metrics.jsonl; one with the newest step, such as an evaluation, joins it."""
        row: Record = {"step": record["step"]}
        row |= {name: float(value) for name, value in record.items() if self.keeps(name, value)}
        self.warned = count_alarms([row], self.warned)
        if self.new and self.new[-1]["step"] == row["step"]:
            self.new[-1] |= row
            return
        self.new.append(row)
        self.steps += 1
        if len(self.new) > 2 * self.width:
            self.old += two_rows(self.new[: 2 * self.width])
            self.new = self.new[2 * self.width :]
        if len(self.old) >= MOST_ROWS:
            self.width *= 2
            self.old = [row for place in range(0, len(self.old), 4) for row in two_rows(self.old[place : place + 4])]

    def keeps(self, name: str, value: Any) -> bool:
        """Return whether a metric is shown anywhere, and its value a number that can be drawn."""
        if name not in self.names and len(self.names) < MOST_NAMES:
            self.names[name] = name != "step" and (is_drawn(name) or name.startswith(PREFIX))
        return self.names.get(name, False) and type(value) in (int, float) and abs(value) < LARGEST

    def rows(self) -> list[Record]:
        """Return the rows, in the order of the steps; the last is the newest step."""
        rows = [*self.old, *two_rows(self.new[:-1]), *self.new[-1:]]
        return sorted(rows, key=lambda row: row["step"])


def two_rows(rows: list[Record]) -> list[Record]:
    """Return a row of the first step and one of the last in place of some rows. Each metric has its lowest and its
    highest value in them, in the order in which these came, or its mean in both where means are drawn."""
    if len(rows) <= 2:
        return rows
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    first, last = {"step": rows[0]["step"]}, {"step": rows[-1]["step"]}
    columns.pop("step")
    for name, values in columns.items():
        low, high = min(values), max(values)
        ends = (low, high) if values.index(low) <= values.index(high) else (high, low)
        first[name], last[name] = (fmean(values),) * 2 if name.startswith(AVERAGED) else ends
    return [first, last]
