"""What to say when memory runs out: the plan's table, the row that was probably wrong, the settings that would help."""

from dataclasses import dataclass, field

from lowmem_grpo.memory.plan import MemoryPlan, Row
from lowmem_grpo.units import size_text

# Rows of a plan that do not depend on how much is done at once: a shortage does not show that they are wrong.
FIXED = ("weight", "embedding", "head", "adapter", "gradient", "optimizer", "context", "reserve")
SHOWN = 3  # settings


@dataclass
class MemoryAdvice:
    """`settings` lists for each phase what would help, the best first; `plan` may be set later."""

    settings: dict[str, list[str]] = field(default_factory=dict)
    plan: MemoryPlan | None = None

    def text(self, phase: str) -> str:
        """The table, if there is one, and the settings that would help."""
        settings = self.settings.get(phase, [])[:SHOWN]
        helpful = "What would help: " + "; ".join(settings or ["a shorter context", "a smaller model"])
        table = self.table(phase)
        return f"Planned:\n{table}\n{helpful}" if table else helpful

    def table(self, phase: str) -> str:
        """The plan's rows of a phase, the largest first, and their sum; empty without a plan."""
        if self.plan is None:
            return ""
        rows = sorted(((row.name, size_of(row, phase)) for row in self.plan.rows), key=lambda row: row[1], reverse=True)
        rows.append(("together", sum(size for _, size in rows)))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {size_text(size):>12}" for name, size in rows if size)

    def wrong_row(self, phase: str, what: str, peak: int) -> str:
        """Planned and measured bytes, and the row to blame: the one named like what failed, or the largest row that
        grows with the amount done at once. Empty without a plan."""
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


def size_of(row: Row, phase: str) -> int:
    """Bytes of a row of the plan in a phase, train or rollout."""
    return row.train if phase == "train" else row.rollout
