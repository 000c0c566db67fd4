"""Tables on the terminal: the result of `lowmem-grpo eval`, a plan, and the jobs of a server."""

import time
from typing import Any

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from lowmem_grpo.memory.plan import Choice, MemoryPlan
from lowmem_grpo.memory.time_plan import TimePlan
from lowmem_grpo.runs.accuracy import changed_first, interval_text
from lowmem_grpo.runs.records import prompt_text
from lowmem_grpo.runs.views.console import answers_table, any_console, print_line
from lowmem_grpo.utils import GIB, count_text, size_text, time_text

MODELS = ("base", "adapter")
OF_EPISODES = (  # metric, label, format
    ("turns/mean", "turns of an episode", ".2f"), ("tools/call_frequency", "calls of tools", ".2f"),
    ("tools/failure_frequency", "of these failed", ".1%"), ("episodes/max_turns", "ended by max_turns", ".1%"),
    ("episodes/parse_error", "ended by unreadable calls", ".1%"), ("episodes/context", "did not fit", ".1%"),
    ("episodes/environment_error", "environment failed", ".1%"), ("episodes/timeout", "took too long", ".1%"),
)
LONGEST = 600  # characters of an answer that are shown
BYTES = ("kv_bytes",)  # choices whose value is in bytes
STYLES = {"running": "green", "stopping": "yellow", "done": "dim", "failed": "red", "waiting": "cyan"}


def show_result(result: dict[str, Any], note: str, shown: int, width: int | None = None) -> None:
    """Print the results, and the first answers to `shown` prompts side by side."""
    console = any_console(width=width, highlight=False)
    named = [name for name in MODELS if name in result]
    print_line(console, title(result, note))
    console.print(numbers_table(result, named))
    if "difference" in result:
        print_line(console, change_text(result))
    if shown:
        rows = [(prompt_text(row["prompt"]), row.get("answer"),
                 [(row[name][0]["text"], row[name][0]["right"]) for name in named]) for row in result["rows"]]
        if len(named) > 1:
            pairs = [(base[1], adapter[1]) for _, _, (base, adapter) in rows]
            rows = [rows[place] for place in changed_first(pairs, shown)]
        console.print(answers_table(("prompt", *named), rows[:shown], LONGEST))


def title(result: dict[str, Any], note: str) -> str:
    plain = "32-bit" if result.get("dtype") == "float32" else "16-bit"
    held = "4-bit" if result["load_in_4bit"] else "FP8" if result.get("load_in_fp8") else plain
    source = f"recipe {result['recipe']}" if result["recipe"] else result["dataset"]
    answers = "one answer" if result["samples"] == 1 else f"{result['samples']} answers"
    name = f"{result['model']} ({held} weights){f', {note}' if note else ''}"
    return (f"{name}: {result['prompts']} prompts of {source}, {answers} each at temperature {result['temperature']:g}")


def numbers_table(result: dict[str, Any], named: list[str]) -> Table:
    """Return a column for each of the `named` results of an evaluation, with their accuracies and lengths."""
    table = Table(box=SIMPLE)
    table.add_column("")
    for name in named:
        table.add_column(name, justify="right")
    results = [result[name] for name in named]
    episodes = [each.get("episodes", {}) for each in results]
    table.add_row("success rate" if episodes[0] else "accuracy", *(f"{each['accuracy']:.1%}" for each in results))
    table.add_row("95% interval", *(f"{each['interval'][0]:.1%} to {each['interval'][1]:.1%}" for each in results))
    for k in results[0]["pass_at_k"]:
        if k != "1":
            table.add_row(f"pass@{k}", *(f"{each['pass_at_k'][k]:.1%}" for each in results))
    for name in results[0].get("rewards", {}):
        table.add_row(name, *(f"{each['rewards'][name]:.3f}" for each in results))
    for name, words, form in OF_EPISODES:
        if any(each.get(name) for each in episodes):
            table.add_row(words, *(format(each.get(name, 0.0), form) for each in episodes))
    whole = "an episode" if episodes[0] else "an answer"
    table.add_row(f"tokens of {whole}", *(f"{each['mean_tokens']:.0f}" for each in results))
    for name, words in (("cut_off", f"cut off at {result['max_tokens']} tokens"), ("unjudged", "not judged")):
        if any(each[name] for each in results):
            table.add_row(words, *(f"{each[name]:.1%}" for each in results))
    return table


def change_text(result: dict[str, Any]) -> str:
    change = result["difference"]
    low, high = change["interval"]
    sure = "more than chance" if low > 0 or high < 0 else "may be chance: take more prompts (--limit)"
    return (f"adapter - base: {100 * change['accuracy']:+.1f} points ({interval_text(change['interval'])}, {sure}); "
            f"prompts: {change['better']} better, {change['worse']} worse, {change['same']} the same")


def show(plan: MemoryPlan, longest: int | None = None, width: int | None = None, time: TimePlan | None = None) -> None:
    """Print a plan's components, choices, step time and verdict, and the `longest` context that fits, if given."""
    console = any_console(width=width, highlight=False)
    console.print(rows_table(plan))
    if plan.choices:
        table = Table("chosen", "value", "saves", "which means", title="Choices", title_justify="left")
        for choice in plan.choices:
            table.add_row(choice.name, value_of(choice), size_text(choice.saved) if choice.saved else "", choice.why)
        console.print(table)
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
    """Return a table of every component's GiB in both phases and on the host."""
    settings = plan.settings
    cards = f"each of {settings.ranks} x {plan.device.name}" if settings.ranks > 1 else plan.device.name
    title = f"{plan.model}: {settings.context:,} tokens x {settings.num_generations} on {cards}, GiB"
    table = Table(title=title, title_justify="left", show_footer=True)
    table.add_column("component", footer="together")
    for name, total in (("rollout", plan.rollout), ("train", plan.train), ("host", plan.host)):
        table.add_column(name, footer=f"{total / GIB:.2f}", justify="right")
    table.add_column("what", footer=f"training holds most in: {plan.moment}", overflow="fold")
    for row in plan.rows:
        table.add_row(row.name, *(gib(size) for size in (row.rollout, row.train, row.host)), row.note)
    return table


def time_table(time: TimePlan) -> Table:
    """Return a table of the estimated seconds of each part of a step."""
    table = Table(title="A step's time (estimated, not measured)", title_justify="left", show_footer=True)
    table.add_column("part", footer="together")
    table.add_column("seconds", footer=f"{time.step_seconds or 0.0:.2f}", justify="right")
    table.add_column("what", overflow="fold", footer="from data sheet, counted FLOP, bytes and launches")
    for part, seconds in time.seconds.items():
        table.add_row(part, f"{seconds:.2f}", part_text(part, time))
    return table


def part_text(part: str, time: TimePlan) -> str:
    """Return in words what a part of a planned step does, and what it waits for."""
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
        "optimizer": "one step on all that is trained",
        "copies": "layer inputs to the host and back, where no computation hides them",
        "memory": "asking the driver for what vLLM's sleep gave back",
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
        together = count_text(plan.concurrent_sequences, "sequence")
        return f"Fits: {peak:.2f} of {room:.2f} GiB, {together} sampled at a time."
    return f"Does not fit: {peak:.2f} GiB are needed and {room:.2f} may be used."


def gib(value: int) -> str:
    return f"{value / GIB:.2f}" if value else ""


def show_jobs(jobs: list[dict[str, Any]]) -> None:
    """Print a row for each of a server's jobs, as its API returns them."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("job", "state", "recipe", "for", "needs", "why"):
        table.add_column(name, justify="right" if name == "job" else "left", overflow="fold")
    for job in jobs:
        recipe = " ".join([job["recipe"], *job["options"]])
        state = Text(job["state"], style=STYLES.get(job["state"], ""))
        began = job["began"] if job["began"] and job["state"] != "waiting" else job["came"]
        seconds = max(0.0, float((job["ended"] or time.time()) - began))  # it has run or, while it waits, has waited
        # Text, so that other users' strings are not parsed as markup
        table.add_row(str(job["id"]), state, Text(recipe), time_text(seconds), needs(job), Text(job["why"]))
    any_console().print(table)


def needs(job: dict[str, Any]) -> str:
    share = "" if job["share"] == 1 else f"{job['share']:.0%}"
    peak = "" if job["peak_bytes"] is None else size_text(job["peak_bytes"])
    return ", ".join(filter(None, (share, peak))) or "the card"
