"""The section of bench/RESULTS.md about steps of the whole loop, from the rows of bench/loop/bench.py."""

from typing import Any

from bench.common import tables
from bench.common.rows import newest
from bench.common.targets import judged, section
from bench.loop.goals import GOALS
from lowmem_grpo.units import GIB

PHASES = ("generate", "switch", "score", "train", "optimizer", "rest")  # as shares are shown
CASE = ("shape", "prompts", "gib", "provider", "device", "gpu", "cpu", "cores", "threads")
COLUMNS = ("case", "provider", "s / step", *PHASES, "tokens/s", "sampling", "training", "peak on the card, GiB",
           "on the host, GiB", "planned, GiB", "machine", "commit")


def loop_table(rows: list[dict[str, Any]]) -> list[str]:
    """The newest row of each provider, case and machine; then the targets."""
    lines = [
        "", "## A step of the whole loop: time by phase, and peaks", "",
        "Llama-3.1-8B's shape with random weights. `switch` is sleeping, waking, and updating the sampler's weights. "
        "The peak on the card is all memory in use there; a CPU has none.", "",
        *tables.markdown(COLUMNS, map(cells_of, newest(rows, *CASE).values())),
    ]
    return lines + section("The whole loop: the targets", judged(GOALS, rows))


def cells_of(row: dict[str, Any]) -> list[str]:
    """One row, or why it has no figures."""
    where = row["gpu"] if row["device"] == "cuda" else f"{row['cpu']}, {row['threads']} threads"
    figures = tables.missing(row["missing"], len(COLUMNS) - 4) if row.get("missing") else measures(row)
    return [case_of(row), row["provider"], *figures, where, row["commit"]]


def case_of(row: dict[str, Any]) -> str:
    """Sequences and their lengths, and what of the card may be used."""
    cap = f", {row['gib']:g} GiB" if row["gib"] else ""
    return (f"{row['shape']}: {row['prompts']} x {row['generations']} x {row['completion_tokens']:,} tokens after "
            f"{row['prompt_tokens']:,}{cap}")


def measures(row: dict[str, Any]) -> list[str]:
    """Seconds, shares, speeds, peaks and the plan."""
    shares = [f"{row['shares'].get(name, 0):.1%}" for name in PHASES]
    speeds = [tables.number(row["tokens_per_second"], name, ".0f") for name in ("step", "generate", "train")]
    return [f"{row['seconds']:.2f}", *shares, *speeds, peak(row.get("used_bytes")),
            peak(row.get("host_bytes")), planned(row)]


def peak(phases: dict[str, int] | None) -> str:
    return f"{max(phases.values()) / GIB:.2f}" if phases else ""


def planned(row: dict[str, Any]) -> str:
    """What the planner said of the card: the larger of both phases."""
    plan = row.get("planned")
    return f"{max(plan['rollout_bytes'], plan['train_bytes']) / GIB:.2f}" if plan else ""
