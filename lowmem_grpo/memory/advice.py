"""What to say where memory ran out: the plan's table, its row that was wrong, the settings that would help."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lowmem_grpo.units import size_text

# Rows of a plan that do not depend on how much is done at once: a shortage says nothing against them.
FIXED = ("weight", "embedding", "head", "adapter", "gradient", "optimizer", "context", "reserve")
SHOWN = 3  # settings


class PlanRow(Protocol):
    """Bytes of one component in each phase."""

    @property
    def name(self) -> str: ...
    @property
    def train(self) -> int: ...
    @property
    def rollout(self) -> int: ...


class Plan(Protocol):
    """What a memory plan has to offer here."""

    @property
    def rows(self) -> Sequence[PlanRow]: ...


@dataclass
class MemoryAdvice:
    """`settings` are those that would help, by phase, the best first. `plan` may be set at any time, and `describe`
    to print something else than the plan's rows."""

    settings: dict[str, list[str]] = field(default_factory=dict)
    plan: Plan | None = None
    describe: Callable[[], str] | None = None

    def text(self, phase: str) -> str:
        """The table, where there is one, and the settings."""
        settings = self.settings.get(phase, [])[:SHOWN]
        helpful = "What would help: " + "; ".join(settings or ["a shorter context", "a smaller model"])
        table = self.table(phase)
        return f"Planned:\n{table}\n{helpful}" if table else helpful

    def table(self, phase: str) -> str:
        """The plan's rows of a phase, the largest first, and their sum; empty without a plan."""
        if self.describe is not None:
            return self.describe()
        if self.plan is None:
            return ""
        rows = sorted(((row.name, size_of(row, phase)) for row in self.plan.rows), key=lambda row: row[1], reverse=True)
        rows.append(("together", sum(size for _, size in rows)))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {size_text(size):>12}" for name, size in rows if size)

    def wrong_row(self, phase: str, what: str, peak: int) -> str:
        """Planned against measured, and the row to blame: that of what failed, or the largest one that grows with what
        is done at once. Empty without a plan."""
        if self.plan is None or not self.plan.rows:
            return ""
        rows = self.plan.rows
        named = [row for row in rows if row.name.split()[0].lower() in what.split() and size_of(row, phase)]
        grows = [row for row in rows if not any(word in row.name.lower() for word in FIXED)]
        blamed = max(named or grows or rows, key=lambda row: size_of(row, phase))
        planned = sum(size_of(row, phase) for row in rows)
        return (
            f"The plan has {size_text(planned)} in this phase and {size_text(peak)} were measured; its row that is "
            f"most likely wrong: {blamed.name} ({size_text(size_of(blamed, phase))})"
        )


def size_of(row: PlanRow, phase: str) -> int:
    return row.train if phase == "train" else row.rollout
