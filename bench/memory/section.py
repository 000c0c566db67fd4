"""The section of bench/RESULTS.md about memory, from the rows of bench/memory/bench.py."""

from typing import Any

from bench.common.rows import newest
from bench.memory.stages import STAGES
from lowmem_grpo.units import GIB

CASE = ("shape", "context", "generations", "rank", "device", "gib", "gpu")
Rows = list[dict[str, Any]]


def newest_cases(rows: Rows) -> dict[tuple[str, ...], Rows]:
    """The newest row of each stage, stage by stage, of every case."""
    cases: dict[tuple[str, ...], Rows] = {}
    for row in newest(rows, *CASE, "stage").values():
        cases.setdefault(tuple(str(row.get(name)) for name in CASE), []).append(row)
    order = list(STAGES)
    return {case: sorted(found, key=lambda row: order.index(row["stage"])) for case, found in cases.items()}


def memory_table(rows: Rows) -> list[str]:
    """A column for each stage of each case: peaks on device and host; then planned beside weighed."""
    lines = [
        "", "## Memory of a training step: peaks on device / host in GiB, one feature after the other", "",
        "NF4 weights, LoRA on all linears; completions from half the context to all of it. Without a GPU's name: the "
        "real step on fake tensors, which shows the memory of tensors, but not the driver's.", "",
        f"| case | {' | '.join(STAGES)} | machine | commit |", f"|---|{'---|' * len(STAGES)}---|---|",
    ]
    cases = newest_cases(rows)
    lines += [case_line(found) for found in cases.values()]
    planned = [row for found in cases.values() for row in found if "planned_bytes" in row and "device_bytes" in row]
    lines += ["", "| case | planned, GiB | weighed or measured, GiB | ratio | planned on the host | weighed |",
              "|---|---|---|---|---|---|"]
    return lines + [planned_line(row) for row in planned]


def name_of(row: dict[str, Any]) -> str:
    return f"{row['shape']}, {row['context']:,} x {row['generations']}"


def case_line(rows: Rows) -> str:
    """One case: every stage that was run."""
    by_stage = {row["stage"]: row for row in rows}
    cells = [peaks(by_stage.get(stage)) for stage in STAGES]
    where = rows[-1].get("gpu") if rows[-1]["device"] == "cuda" else "fake tensors"
    return f"| {name_of(rows[-1])} | {' | '.join(cells)} | {where} | {rows[-1]['commit']} |"


def peaks(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "device_bytes" not in row:
        return str(row.get("error", ""))[:40]
    host = f" / {row['host_bytes'] / GIB:.1f}" if row["host_bytes"] else ""
    return f"{row['device_bytes'] / GIB:.1f}{host}"


def planned_line(row: dict[str, Any]) -> str:
    """Planned beside weighed, in GiB."""
    sizes = [row[name] / GIB for name in ("planned_bytes", "device_bytes", "planned_host_bytes", "host_bytes")]
    return (f"| {name_of(row)} | {sizes[0]:.2f} | {sizes[1]:.2f} | {sizes[0] / sizes[1]:.3f} | {sizes[2]:.2f} "
            f"| {sizes[3]:.2f} |")


def longest_table(rows: Rows) -> list[str]:
    """Of each model and bound: the longest context that fitted, and the shortest that did not."""
    lines = ["", "## The longest context whose training step fits", "",
             "| model | bound, GiB | planned | fits | peak, GiB | host, GiB | does not fit | machine | commit |",
             "|---|---|---|---|---|---|---|---|---|"]
    cases: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        name = tuple(row.get(field) for field in ("shape", "generations", "gib", "device", "gpu"))
        cases.setdefault((*name, row["run"]), []).append(row)
    newest_runs = {name[:-1]: found for name, found in cases.items()}
    return lines + [longest_line(found) for found in newest_runs.values()]


def longest_line(rows: Rows) -> str:
    """One search."""
    best = max((row for row in rows if row["fits"]), key=lambda row: row["context"], default=None)
    failing = min((row["context"] for row in rows if not row["fits"]), default=None)
    last = rows[-1]
    cells = [f"{last['shape']} x {last['generations']}", f"{last['gib']:g}", f"{last['planned_context']:,}"]
    if best:
        cells += [f"{best['context']:,}", f"{best['device_bytes'] / GIB:.2f}", f"{best['host_bytes'] / GIB:.2f}"]
    else:
        cells += ["", "", ""]
    where = last["gpu"] if last["device"] == "cuda" else "fake tensors"
    return f"| {' | '.join([*cells, f'{failing:,}' if failing else '', str(where), last['commit']])} |"
