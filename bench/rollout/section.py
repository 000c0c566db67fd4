"""The section of bench/RESULTS.md about rollouts, from the rows of bench/rollout/bench.py."""

from typing import Any

from bench.common import tables
from bench.common.rows import newest
from bench.common.targets import judged, section
from bench.rollout.goals import GOALS
from lowmem_grpo.units import MIB

CASE = ("shape", "provider", "device", "gpu", "cpu", "cores", "threads")
FIGURES = (  # column, the row's field, how it is printed, what it is divided by
    ("tokens/s p20", "p20", ".0f", 1), ("p50", "p50", ".0f", 1), ("p80", "p80", ".0f", 1),
    ("trainer's weights, MiB", "trainer_bytes", ".2f", MIB), ("added, MiB", "added_bytes", ".2f", MIB),
    ("KV cache, MiB", "kv_bytes", ".2f", MIB), ("parity mean", "parity_mean", ".5f", 1),
    ("max", "parity_max", ".5f", 1), ("sync, ms", "sync_ms", ".4f", 1),
)
COLUMNS = ("shape", "provider", *(name for name, *_ in FIGURES), "machine", "commit")


def rollout_table(rows: list[dict[str, Any]]) -> list[str]:
    """The newest row of each provider, shape and machine; then the targets."""
    lines = [
        "", "## Rollouts: our engine on the trainer's NF4 weights and live LoRA, and vLLM with weights of its own", "",
        *tables.markdown(COLUMNS, map(cells_of, newest(rows, *CASE).values())),
    ]
    return lines + section("Rollouts: the targets", judged(GOALS, rows))


def cells_of(row: dict[str, Any]) -> list[str]:
    """One row, or why it has no figures."""
    size = f"{row['shape']}: {row['sequences']} x {row['completion_tokens']}"
    figures = (tables.missing(row["missing"], len(FIGURES)) if row.get("missing")
               else [tables.number(row, *figure) for _, *figure in FIGURES])
    where = row["gpu"] or f"{row['cpu']}, {row['threads']} threads"
    return [size, row["provider"], *figures, where, row["commit"]]
