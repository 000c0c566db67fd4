"""The gate's last page: what passed, what failed and why, what did not run, and how the targets stand."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.common.rows import read_rows
from bench.gate.runner import CUT_OFF, FAILED, NOT_RUN, PASSED, SKIPPED, Outcome
from bench.gate.stages import CARD, CPU, PRETEND, Setup
from bench.kernels.goals import verdicts as kernel_verdicts
from bench.loop.goals import verdicts as loop_verdicts
from bench.rollout.goals import verdicts as rollout_verdicts

COLORS = {PASSED: "green", FAILED: "red", SKIPPED: "yellow", NOT_RUN: "dim", CUT_OFF: "red"}
MEANS = {
    CARD: "measured on this card",
    PRETEND: "on a pretend card, whose kernels do nothing: no time and no value here means anything",
    CPU: "a dry run on the CPU with tiny shapes: it shows that the commands run, and measures nothing",
}
GIB = 2**30


@dataclass(frozen=True)
class Target:
    """One number to reach, as the last page shows it."""

    what: str
    demand: str
    measured: str
    status: str


def targets(setup: Setup) -> list[Target]:
    """Memory of the 8B step, then those of loop, rollouts and kernels on a card; by the rows that are recorded."""
    kernels = [Target(v.target.case, v.target.demand, v.measured, v.status)
               for v in kernel_verdicts(rows_of(setup, "kernels")) if v.target.device == "cuda"]
    rollouts = [Target(f"rollout, {v.target.shape}", v.target.demand, v.measured, v.status)
                for v in rollout_verdicts(rows_of(setup, "rollout")) if v.target.device == "cuda"]
    loops = [Target(f"loop, {v.target.shape}, {v.target.ours}", v.target.demand, v.measured, v.status)
             for v in loop_verdicts(rows_of(setup, "loop")) if v.target.device == "cuda"]
    return [*memory_targets(rows_of(setup, "memory")), *loops, *rollouts, *kernels]


def rows_of(setup: Setup, name: str) -> list[dict[str, Any]]:
    return read_rows(setup.results / f"{name}.jsonl")


def memory_targets(rows: list[dict[str, Any]]) -> list[Target]:
    """The newest step of 20,480 tokens on each bounded card: it fits, and the planner had said its peak within 5%."""
    found = {}
    for row in rows:
        if row["device"] == "cuda" and row.get("gib") and row["stage"] == "+ 8-bit optimizer":
            found[row["gib"]] = row
    return [target for gib, row in sorted(found.items()) for target in fit(gib, row)]


def fit(gib: float, row: dict[str, Any]) -> list[Target]:
    """One bounded card."""
    what = f"{row['shape']}, {row['context']:,} x {row['generations']}, {gib:g} GiB of the card"
    if "device_bytes" not in row:
        return [Target(what, "fits", str(row.get("error", "")), "missed")]
    ratio = row["planned_bytes"] / row["device_bytes"]
    return [
        Target(what, "fits", f"{row['device_bytes'] / GIB:.2f} GiB, {row['reserved_bytes'] / GIB:.2f} reserved, "
               f"{row['used_bytes'] / GIB:.2f} in use", "met"),
        Target(what, "planned within 5%", f"{ratio:.3f}", "met" if abs(ratio - 1) <= 0.05 else "missed"),
    ]


def machine_lines(setup: Setup) -> list[str]:
    """What ran, and where."""
    facts = setup.facts
    if not facts:
        return ["The machine could not be looked at: see the environment's log."]
    where = facts["gpu"] or f"{facts['cpu']}, {facts['cores']} cores"
    card = f", {facts['card_gib']} GiB, driver {facts.get('driver')}" if facts.get("card_gib") else ""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    runner = f"; vLLM's model runner: {facts['vllm_runner']}" if facts.get("vllm_runner") else ""
    return [f"{where}{card}; {MEANS[setup.form]}.", f"commit {facts['commit']}, {facts['date']}; {versions}{runner}"]


def counts(outcomes: list[Outcome]) -> str:
    """Such as "12 passed, 1 failed"."""
    found = Counter(outcome.status for outcome in outcomes)
    return ", ".join(f"{found[status]} {status}" for status in COLORS if found[status])


def document(setup: Setup, outcomes: list[Outcome]) -> str:
    """The page as markdown."""
    lines = ["# GPU gate", "", *machine_lines(setup), "", f"{counts(outcomes)}.", "",
             "| piece | | seconds | why |", "|---|---|---|---|"]
    lines += [f"| {o.name} | {o.status} | {o.seconds:.0f} | {o.reason.replace('|', '/')} |" for o in outcomes]
    if setup.form == CARD:
        lines += ["", "| target | to reach | measured | |", "|---|---|---|---|"]
        lines += [f"| {t.what} | {t.demand} | {t.measured} | {t.status} |" for t in targets(setup)]
    return "\n".join(lines) + "\n"


def show(setup: Setup, outcomes: list[Outcome], console: Console) -> None:
    """The page on the terminal; of the targets only how many are met, and those that are not."""
    table = Table("piece", "", "seconds", "why", title="GPU gate")
    for o in outcomes:
        table.add_row(o.name, f"[{COLORS[o.status]}]{o.status}[/]", f"{o.seconds:.0f}", escape(o.reason[:240]))
    console.print(table)
    if setup.form == CARD:
        found = targets(setup)
        missed = Table("target", "to reach", "measured", title="targets missed")
        for t in found:
            if t.status == "missed":
                missed.add_row(t.what, t.demand, t.measured)
        console.print(missed)
        console.print(", ".join(f"{n} {status}" for status, n in Counter(t.status for t in found).items()))
    console.print("\n".join(machine_lines(setup)), f"\n{counts(outcomes)}", highlight=False)


def write(setup: Setup, outcomes: list[Outcome]) -> Path:
    """Write gate.md beside the logs."""
    page = setup.out / "gate.md"
    page.write_text(document(setup, outcomes))
    return page
