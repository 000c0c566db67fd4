"""The section of bench/RESULTS.md about rollouts, from the rows of bench/rollout/bench.py."""

from typing import Any

from bench.common.rows import newest
from bench.common.targets import judged, section
from bench.rollout.goals import GOALS
from lowmem_grpo.units import MIB


def rollout_table(rows: list[dict[str, Any]]) -> list[str]:
    """The newest row of each provider, shape and machine; then the targets."""
    lines = [
        "", "## Rollouts: our engine on the trainer's NF4 weights and live LoRA, and vLLM with weights of its own", "",
        "| shape | provider | tokens/s p20 | p50 | p80 | trainer's weights, MiB | added, MiB | KV cache, MiB "
        "| parity mean | max | sync, ms | machine | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in newest(rows, "shape", "provider", "device", "gpu", "cpu", "cores", "threads").values():
        lines.append(line_of(row))
    return lines + section("Rollouts: the targets", judged(GOALS, rows))


def line_of(row: dict[str, Any]) -> str:
    """One row, or why it has no figures."""
    size = f"{row['shape']}: {row['sequences']} x {row['completion_tokens']}"
    where = f"{row['gpu'] or row['cpu'] + ', ' + str(row['threads']) + ' threads'} | {row['commit']} |"
    if row.get("missing"):
        reason = row["missing"].replace("|", "/")[:80]
        return f"| {size} | {row['provider']} | missing: {reason} {'| ' * 8}| {where}"
    cells = [f"{row[name]:.0f}" for name in ("p20", "p50", "p80")]
    cells += [f"{row[name] / MIB:.2f}" if name in row else "" for name in ("trainer_bytes", "added_bytes", "kv_bytes")]
    cells += [f"{row[name]:.5f}" for name in ("parity_mean", "parity_max")]
    cells.append(f"{row['sync_ms']:.4f}" if "sync_ms" in row else "")
    return f"| {size} | {row['provider']} | {' | '.join(cells)} | {where}"
