"""A memory plan on the terminal."""

from rich.console import Console
from rich.table import Table

from lowmem_grpo.cards import GIB, MIB
from lowmem_grpo.memory_plan import Choice, MemoryPlan

BYTES = ("kv_bytes",)  # choices whose value is one


def show(plan: MemoryPlan, longest: int | None = None, width: int | None = None) -> None:
    """Print rows, choices and the verdict; `longest` is the longest context that fits, where it was asked for."""
    console = Console(width=width, highlight=False)
    console.print(rows_table(plan))
    if plan.choices:
        console.print(choices_table(plan))
    if longest is not None:
        console.print(f"Longest context that fits: {longest:,} tokens" if longest else "No context fits.")
    console.print(verdict(plan))
    for line in plan.advice:
        console.print(f"  {line}")


def rows_table(plan: MemoryPlan) -> Table:
    """Every component in both phases, in GiB."""
    settings = plan.settings
    title = f"{plan.model}: {settings.context:,} tokens x {settings.num_generations} on {plan.device.name}, GiB"
    table = Table(title=title, title_justify="left", show_footer=True)
    for name, total in (("rollout", plan.rollout), ("train", plan.train), ("host", plan.host)):
        if name == "rollout":
            table.add_column("component", footer="together")
        table.add_column(name, footer=f"{total / GIB:.2f}", justify="right")
    table.add_column("what", footer=f"training holds most in: {plan.moment}", overflow="fold")
    for row in plan.rows:
        table.add_row(row.name, *(gib(size) for size in (row.rollout, row.train, row.host)), row.note)
    return table


def choices_table(plan: MemoryPlan) -> Table:
    """What was chosen, and what it bought."""
    table = Table("chosen", "value", "saves", "which means", title="Choices", title_justify="left")
    for choice in plan.choices:
        table.add_row(choice.name, value_of(choice), size(choice.saved), choice.why)
    return table


def value_of(choice: Choice) -> str:
    if choice.name in BYTES:
        return size(choice.value)
    return f"{choice.value:,}" if isinstance(choice.value, int) and choice.value is not True else str(choice.value)


def verdict(plan: MemoryPlan) -> str:
    """Whether it fits, in a line."""
    peak, room = plan.peak / GIB, plan.device.budget / GIB
    if plan.fits:
        return f"Fits: {peak:.2f} of {room:.2f} GiB, {plan.concurrent_sequences} sequences sampled at a time."
    return f"Does not fit: {peak:.2f} GiB are needed and {room:.2f} may be used."


def gib(value: int) -> str:
    return f"{value / GIB:.2f}" if value else ""


def size(value: int) -> str:
    """Bytes as a person reads them."""
    if not value:
        return ""
    return f"{value / GIB:.2f} GiB" if value >= GIB else f"{value / MIB:.0f} MiB"
