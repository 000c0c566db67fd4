"""The gate's last page: what passed, what failed and why, what did not run, and which targets are met."""

from collections import Counter
from pathlib import Path

from bench.common import tables
from bench.common.rows import read_rows
from bench.common.targets import Standing, judged, lines
from bench.gate.runner import CUT_OFF, FAILED, NOT_RUN, PASSED, SKIPPED, Outcome
from bench.gate.stages import CARD, CPU, PRETEND, Setup
from bench.kernels.goals import GOALS as KERNELS
from bench.loop.bench import GOALS as LOOP
from bench.memory.section import GOALS as MEMORY
from bench.rollout.bench import GOALS as ROLLOUTS

STATUSES = (PASSED, FAILED, SKIPPED, NOT_RUN, CUT_OFF)
PIECES = ("piece", "", "seconds", "why")
MEANS = {
    CARD: "measured on this card",
    PRETEND: "on a pretend card, whose kernels do nothing: times and values mean nothing here",
    CPU: "a dry run on the CPU with tiny shapes: it shows that the commands work, and measures nothing",
}
GOALS = {"memory": MEMORY, "loop": LOOP, "rollout": ROLLOUTS, "kernels": KERNELS}  # by the name of their rows


def targets(setup: Setup) -> list[Standing]:
    """Return the standings of the targets for a card by the recorded rows: memory, loop, rollouts, kernels."""
    return [standing for name, goals in GOALS.items()
            for standing in judged(goals, read_rows(setup.results / f"{name}.jsonl"), "cuda")]


def machine_lines(setup: Setup) -> list[str]:
    """Return lines on the machine and the versions."""
    facts = setup.facts
    if not facts:
        return ["The facts about this machine are missing: see the environment's log."]
    where = facts["gpu"] or f"{facts['cpu']}, {facts['cores']} cores"
    card = f", {facts['card_gib']} GiB, driver {facts.get('driver')}" if facts.get("card_gib") else ""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return [f"{where}{card}; {MEANS[setup.form]}.", f"commit {facts['commit']}, {facts['date']}; {versions}"]


def counts(outcomes: list[Outcome]) -> str:
    """Return a text such as "12 passed, 1 failed"."""
    found = Counter(outcome.status for outcome in outcomes)
    return ", ".join(f"{found[status]} {status}" for status in STATUSES if found[status])


def document(setup: Setup, outcomes: list[Outcome]) -> str:
    """Return the page as Markdown."""
    rows = ([o.name, o.status, f"{o.seconds:.0f}", o.reason.replace("|", "/")] for o in outcomes)
    page = ["# GPU gate", "", *machine_lines(setup), "", f"{counts(outcomes)}.", "", *tables.markdown(PIECES, rows)]
    if setup.form == CARD:
        page += ["", *lines(targets(setup))]
    return "\n".join(page) + "\n"


def write(setup: Setup, outcomes: list[Outcome]) -> Path:
    """Write gate.md beside the logs."""
    page = setup.out / "gate.md"
    page.write_text(document(setup, outcomes))
    return page
