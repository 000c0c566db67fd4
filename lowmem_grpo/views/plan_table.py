"""A plan on the terminal: bytes of both phases, and the seconds of a step."""

from rich.table import Table

from lowmem_grpo.memory.plan import Choice, MemoryPlan
from lowmem_grpo.planning.time_plan import TimePlan
from lowmem_grpo.units import GIB, size_text
from lowmem_grpo.views.console import any_console

BYTES = ("kv_bytes",)  # choices whose value is one


def show(plan: MemoryPlan, longest: int | None = None, width: int | None = None, time: TimePlan | None = None) -> None:
    """Print rows, choices, a step's time and the verdict; `longest` is the longest context that fits, if it was asked
    for."""
    console = any_console(width=width, highlight=False)
    console.print(rows_table(plan))
    if plan.choices:
        console.print(choices_table(plan))
    if time is not None and time.why is None:
        console.print(time_table(time))
    if longest is not None:
        console.print(f"Longest context that fits: {longest:,} tokens" if longest else "No context fits.")
    console.print(verdict(plan))
    for line in plan.advice:
        console.print(f"  {line}")
    if time is not None and time.why is not None:
        console.print(f"A step's time is not estimated: {time.why}")


def rows_table(plan: MemoryPlan) -> Table:
    settings = plan.settings
    cards = f"each of {settings.ranks} x {plan.device.name}" if settings.ranks > 1 else plan.device.name
    title = f"{plan.model}: {settings.context:,} tokens x {settings.num_generations} on {cards}, GiB"
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
    table = Table("chosen", "value", "saves", "which means", title="Choices", title_justify="left")
    for choice in plan.choices:
        table.add_row(choice.name, value_of(choice), size_text(choice.saved) if choice.saved else "", choice.why)
    return table


def time_table(time: TimePlan) -> Table:
    title = "A step's time (estimated, not measured)"
    table = Table(title=title, title_justify="left", show_footer=True)
    table.add_column("part", footer="together")
    table.add_column("seconds", footer=f"{time.step_seconds or 0.0:.2f}", justify="right")
    table.add_column("what", overflow="fold", footer="from data sheet, counted FLOP, bytes and launches")
    for part, seconds in time.seconds.items():
        table.add_row(part, f"{seconds:.2f}", told(part, time))
    return table


def told(part: str, time: TimePlan) -> str:
    work = time.workload
    waits = {name: f"; waits for the {bound}" if bound == "card" else "; waits for the host's launches"
             for name, bound in time.bound.items()}
    batches = f"{time.micro_batches:,} micro-batch" + ("es" if time.micro_batches > 1 else "")
    return {
        "prefill": f"{work.prompts:,} prompts of {work.prompt_length:,.0f} tokens, each read once",
        "decode": f"{time.token_steps:,} token steps of {time.sampled_together:,} sequences, weights in "
                  f"{time.sampling_bits} bits; the last {time.tail_steps:,}, of less than a quarter of them, take "
                  f"{time.tail_seconds:.2f} s",
        "forward": f"{batches}, {work.places:,.0f} tokens" + waits.get("forward", ""),
        "backward": "the same again, and what is recomputed" + waits.get("backward", ""),
        "optimizer": "one step on the adapters",
        "copies": "layer inputs to the host and back, where no computation hides them",
        "ranks": "the gradients of all cards, added up (as measured on a host, an assumption)",
        "engine": "falling asleep and waking, and quick rewards (an assumption)",
    }[part]


def value_of(choice: Choice) -> str:
    if choice.name in BYTES:
        return size_text(choice.value)
    return f"{choice.value:,}" if isinstance(choice.value, int) and choice.value is not True else str(choice.value)


def verdict(plan: MemoryPlan) -> str:
    peak, room = plan.peak / GIB, plan.device.budget / GIB
    if plan.fits:
        return f"Fits: {peak:.2f} of {room:.2f} GiB, {plan.concurrent_sequences} sequences sampled at a time."
    return f"Does not fit: {peak:.2f} GiB are needed and {room:.2f} may be used."


def gib(value: int) -> str:
    return f"{value / GIB:.2f}" if value else ""
