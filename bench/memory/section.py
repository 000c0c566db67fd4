"""What a step of Llama-3.1-8B should reach on cards of 16 and 24 GiB; memory's sections of bench/RESULTS.md."""

from typing import Any

from bench.common import tables
from bench.common.rows import newest
from bench.common.targets import OURS, ByProvider, Goal
from bench.memory.stages import STAGES
from lowmem_grpo.utils import GIB

SHAPE, CONTEXT, STAGE = "llama-3.1-8b", 20480, "+ 8-bit optimizer"


def goals_for(gib: int) -> list[Goal]:
    """It fits, and the planner predicted its peak within 5%."""
    case = f"{SHAPE}, {CONTEXT:,} tokens, {gib} GiB of the card"
    fields = {"device": "cuda", "gib": gib, "shape": SHAPE, "context": CONTEXT, "stage": STAGE}
    return [Goal(case, "fits", gib * GIB, peak, told, fields, any_card=True),
            Goal(case, "planned within 5%", 0.05, lambda run: abs(planned(run) - 1),
                 lambda value, run: f"{planned(run):.3f}", fields, any_card=True)]


def peak(run: ByProvider) -> float:
    """Bytes on the card; infinite where memory ran out."""
    return float(run[OURS].get("device_bytes", float("inf")))


def told(value: float, run: ByProvider) -> str:
    row = run[OURS]
    if "device_bytes" not in row:
        return str(row.get("error", ""))
    allocated, reserved, used = (row[name] / GIB for name in ("device_bytes", "reserved_bytes", "used_bytes"))
    return f"{allocated:.2f} GiB, {reserved:.2f} reserved, {used:.2f} in use"


def planned(run: ByProvider) -> float:
    """The planned peak divided by the measured one."""
    return float(run[OURS]["planned_bytes"] / run[OURS]["device_bytes"])


GOALS = [goal for gib in (16, 24) for goal in goals_for(gib)]

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
    cases = newest_cases(rows)
    lines = [
        "", "## Memory of a training step: peaks on device / host in GiB, one feature after the other", "",
        "NF4 weights, LoRA on all linears; completions from half the context to all of it. Without a GPU's name: the "
        "real step on fake tensors, which shows the memory of tensors, but not the driver's.", "",
        *tables.markdown(("case", *STAGES, "machine", "commit"), map(case_cells, cases.values())), "",
    ]
    planned = [row for found in cases.values() for row in found if "planned_bytes" in row and "device_bytes" in row]
    columns = ("case", "planned, GiB", "weighed or measured, GiB", "ratio", "planned on the host", "weighed")
    return lines + tables.markdown(columns, map(planned_cells, planned))


def name_of(row: dict[str, Any]) -> str:
    return f"{row['shape']}, {row['context']:,} x {row['generations']}"


def case_cells(rows: Rows) -> list[str]:
    """One case: every stage that was run."""
    by_stage = {row["stage"]: row for row in rows}
    return [name_of(rows[-1]), *(peaks(by_stage.get(stage)) for stage in STAGES), place(rows[-1]), rows[-1]["commit"]]


def place(row: dict[str, Any]) -> str:
    return str(row.get("gpu")) if row["device"] == "cuda" else "fake tensors"


def peaks(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "device_bytes" not in row:
        return str(row.get("error", ""))[:40]
    host = f" / {row['host_bytes'] / GIB:.1f}" if row["host_bytes"] else ""
    return f"{row['device_bytes'] / GIB:.1f}{host}"


def planned_cells(row: dict[str, Any]) -> list[str]:
    """Planned beside weighed, in GiB."""
    sizes = [row[name] / GIB for name in ("planned_bytes", "device_bytes", "planned_host_bytes", "host_bytes")]
    planned, weighed, *host = (f"{size:.2f}" for size in sizes)
    return [name_of(row), planned, weighed, f"{sizes[0] / sizes[1]:.3f}", *host]


def longest_table(rows: Rows) -> list[str]:
    """Of each model and bound: the longest context that fitted, and the shortest that did not."""
    columns = ("model", "bound, GiB", "planned", "fits", "peak, GiB", "host, GiB", "does not fit", "machine", "commit")
    cases: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        name = tuple(row.get(field) for field in ("shape", "generations", "gib", "device", "gpu"))
        cases.setdefault((*name, row["run"]), []).append(row)
    newest_runs = {name[:-1]: found for name, found in cases.items()}
    return ["", "## The longest context whose training step fits", "",
            *tables.markdown(columns, map(longest_cells, newest_runs.values()))]


def longest_cells(rows: Rows) -> list[str]:
    """One search."""
    best = max((row for row in rows if row["fits"]), key=lambda row: row["context"], default=None)
    failing = min((row["context"] for row in rows if not row["fits"]), default=None)
    last = rows[-1]
    fitted = (("context", ","), ("device_bytes", ".2f", GIB), ("host_bytes", ".2f", GIB))
    return [f"{last['shape']} x {last['generations']}", f"{last['gib']:g}", f"{last['planned_context']:,}",
            *(tables.number(best or {}, *figure) for figure in fitted), f"{failing:,}" if failing else "", place(last),
            last["commit"]]
