"""What every number to be reached has: a limit, the machine that it is meant for, and how it stands."""

from dataclasses import dataclass
from typing import Any, Protocol

CARD = "H200"  # the card that the targets for cards are meant for
MET, MISSED, NOT_RUN = "met", "missed", "not run"
COLORS = {MET: "green", MISSED: "red", NOT_RUN: "dim"}


class Target(Protocol):
    """A number to be reached; each benchmark has its own kind."""

    def is_met(self, value: float) -> bool: ...

    def told(self, value: float) -> str: ...


@dataclass(frozen=True)
class Verdict:
    """How a target stands: the value of the newest run that has one."""

    target: Any  # a Target
    value: float | None = None

    @property
    def status(self) -> str:
        if self.value is None:
            return NOT_RUN
        return MET if self.target.is_met(self.value) else MISSED

    @property
    def measured(self) -> str:
        return "" if self.value is None else str(self.target.told(self.value))

    @property
    def colored(self) -> str:
        """The status for a terminal's table."""
        return f"[{COLORS[self.status]}]{self.status}[/]"


def within(value: float, limit: float, at_least: bool) -> bool:
    """Whether a value is on the right side of its limit; the limit itself is."""
    return value >= limit if at_least else value <= limit


def is_meant_for(device: str, row: dict[str, Any]) -> bool:
    """Whether a row comes from the kind of machine that a target is for."""
    return bool(row["device"] == device and (device == "cpu" or CARD in (row["gpu"] or "")))


def place(device: str) -> str:
    return CARD if device == "cuda" else "CPU"
