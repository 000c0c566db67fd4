"""The section of bench/RESULTS.md about steps of the whole loop, from the rows of bench/loop/bench.py."""

from typing import Any

from bench.common.rows import newest
from bench.common.targets import judged, section
from bench.loop.goals import GOALS
from bench.loop.table import PHASES
from lowmem_grpo.units import GIB

CASE = ("shape", "prompts", "gib", "provider", "device", "gpu", "cpu", "cores", "threads")
COLUMNS = ("case", "provider", "s / step", *PHASES, "tokens/s", "sampling", "training", "peak on the card, GiB",
           "on the host, GiB", "planned, GiB", "machine", "commit")


def loop_table(rows: list[dict[str, Any]]) -> list[str]:
    """The newest row of each provider, case and machine; then the targets."""
    lines = [
        "", "## A step of the whole loop: time by phase, and peaks", "",
        "Llama-3.1-8B's shape with random weights. `switch` is sleeping, waking, and updating the sampler's weights. "
        "The peak on the card is all memory in use there; a CPU has none.", "",
        f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}",
    ]
    lines += [line_of(row) for row in newest(rows, *CASE).values()]
    return lines + section("The whole loop: the targets", judged(GOALS, rows))


def line_of(row: dict[str, Any]) -> str:
    """One row, or why it has no figures."""
    where = row["gpu"] if row["device"] == "cuda" else f"{row['cpu']}, {row['threads']} threads"
    begin, end = [case_of(row), row["provider"]], [where, row["commit"]]
    if row.get("missing"):
        reason = row["missing"].replace("|", "/")[:80]
        cells = [*begin, f"missing: {reason}", *[""] * (len(COLUMNS) - 5), *end]
    else:
        cells = [*begin, f"{row['seconds']:.2f}", *measures(row), *end]
    return f"| {' | '.join(cells)} |"


def case_of(row: dict[str, Any]) -> str:
    """Sequences and their lengths, and what of the card may be used."""
    cap = f", {row['gib']:g} GiB" if row["gib"] else ""
    return (f"{row['shape']}: {row['prompts']} x {row['generations']} x {row['completion_tokens']:,} tokens after "
            f"{row['prompt_tokens']:,}{cap}")


def measures(row: dict[str, Any]) -> list[str]:
    """Shares, speeds, peaks and the plan."""
    shares = [f"{row['shares'].get(name, 0):.1%}" for name in PHASES]
    speeds = [f"{row['tokens_per_second'][name]:.0f}" if name in row["tokens_per_second"] else ""
              for name in ("step", "generate", "train")]
    return [*shares, *speeds, peak(row.get("used_bytes")), peak(row.get("host_bytes")), planned(row)]


def peak(phases: dict[str, int] | None) -> str:
    return f"{max(phases.values()) / GIB:.2f}" if phases else ""


def planned(row: dict[str, Any]) -> str:
    """What the planner said of the card: the larger of both phases."""
    plan = row.get("planned")
    return f"{max(plan['rollout_bytes'], plan['train_bytes']) / GIB:.2f}" if plan else ""
