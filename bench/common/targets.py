"""Targets: each is a `Goal`, judged by the recorded rows; and tables of the results."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from bench.common import tables

OURS = "lowmem_grpo"
CARD = "H200"  # the card that most goals for cards are meant for
MET, MISSED, NOT_RUN = "met", "missed", "not run"
RUN = ("run", "gib", "prompts", "steps")  # rows that agree in these fields were measured in one run
COLUMNS = ("case", "to reach", "measured", "")
BELOW_ONE = 1 - 2**-53  # the largest number that is smaller than 1

Row = dict[str, Any]
ByProvider = dict[str, Row]  # the row of each provider, of one run of a benchmark


@dataclass(frozen=True)
class Goal:
    """A figure computed from one run's rows, and its limit.

    `value` may raise KeyError, or return None, if the run lacks a row or a measure: then an earlier run is judged.
    """

    case: str  # what is measured, without the machine
    demand: str
    limit: float  # a value equal to it is good enough
    value: Callable[[ByProvider], float | None]
    told: Callable[[float, ByProvider], str]  # the value in words
    fields: dict[str, Any] = field(default_factory=dict)  # fields that a row must have, `device` among them
    at_least: bool = False
    any_card: bool = False  # otherwise the goal is for an H200, or for a CPU

    @property
    def device(self) -> str:
        return str(self.fields["device"])

    @property
    def where(self) -> str:
        """The case, and the machine for which the goal is meant."""
        return self.case if self.any_card else f"{self.case}, {'CPU' if self.device == 'cpu' else CARD}"

    def matches(self, row: Row) -> bool:
        """Return whether a row measured this case on this kind of machine."""
        right_card = self.device == "cpu" or self.any_card or CARD in (row["gpu"] or "")
        measured = not row.get("missing") and row.get("warm_up", 1)  # without a warm-up, the time includes compiling
        return bool(right_card and measured) and all(row.get(name) == wanted for name, wanted in self.fields.items())

    def value_of(self, run: ByProvider) -> float | None:
        try:
            return self.value(run)
        except KeyError:  # a provider was left out, or could not run
            return None

    def judged(self, rows: list[Row]) -> "Standing":
        """Return the goal's standing by the newest run that has all rows and measures that it needs."""
        runs: dict[tuple[Any, ...], ByProvider] = {}
        for row in filter(self.matches, rows):
            runs.setdefault(tuple(row.get(name) for name in RUN), {})[row.get("provider", OURS)] = row
        for run in reversed(runs.values()):
            if (value := self.value_of(run)) is not None:
                reached = value >= self.limit if self.at_least else value <= self.limit
                return Standing(self, MET if reached else MISSED, self.told(value, run))
        return Standing(self)


@dataclass(frozen=True)
class Standing:
    """The status of a goal, and the measured value."""

    goal: Goal
    status: str = NOT_RUN
    measured: str = ""


def judged(goals: Iterable[Goal], rows: list[Row], device: str | None = None) -> list[Standing]:
    """Return the standing of each goal by these rows; only of goals for `device`, unless that is None."""
    return [goal.judged(rows) for goal in goals if device in (None, goal.device)]


def lines(found: list[Standing]) -> list[str]:
    """Return the standings as a table in Markdown."""
    return tables.markdown(COLUMNS, ([one.goal.where, one.goal.demand, one.measured, one.status] for one in found))


def section(title: str, found: list[Standing]) -> list[str]:
    """Return a section in Markdown: a table of the goals that were measured, then a list of those not run yet."""
    page = ["", f"## {title}", "", *lines([one for one in found if one.status != NOT_RUN])]
    waiting: dict[str, list[str]] = {}
    for one in found:
        if one.status == NOT_RUN:
            waiting.setdefault(one.goal.where, []).append(one.goal.demand)
    if waiting:
        page += ["", "Not run yet:", "", *(f"- {where}: {'; '.join(demands)}" for where, demands in waiting.items())]
    return page
