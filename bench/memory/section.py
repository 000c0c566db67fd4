"""The targets of a step of Llama-3.1-8B on cards of 16 and 24 GiB, and memory's sections of bench/RESULTS.md."""

from typing import Any

from bench.common import tables
from bench.common.rows import newest
from bench.common.targets import OURS, ByProvider, Goal
from bench.memory.stages import STAGES
from lowmem_grpo.utils import GIB

SHAPE, CONTEXT, STAGE = "llama-3.1-8b", 20480, "+ 8-bit optimizer"


def goals_for(gib: int) -> list[Goal]:
    """Return the goals that the step fits, and that the planner predicted its peak within 5%."""
    case = f"{SHAPE}, {CONTEXT:,} tokens, {gib} GiB of the card"
    fields = {"device": "cuda", "gib": gib, "shape": SHAPE, "context": CONTEXT, "stage": STAGE}
    return [Goal(case, "fits", gib * GIB, peak, told, fields, any_card=True),
            Goal(case, "planned within 5%", 0.05, lambda run: abs(planned(run) - 1),
                 lambda value, run: f"{planned(run):.3f}", fields, any_card=True)]


def peak(run: ByProvider) -> float:
    """Return the bytes on the card; infinity if memory ran out."""
    return float(run[OURS].get("device_bytes", float("inf")))


def told(value: float, run: ByProvider) -> str:
    row = run[OURS]
    if "device_bytes" not in row:
        return str(row.get("error", ""))
    allocated, reserved, used = (row[name] / GIB for name in ("device_bytes", "reserved_bytes", "used_bytes"))
    return f"{allocated:.2f} GiB, {reserved:.2f} reserved, {used:.2f} in use"


def planned(run: ByProvider) -> float:
    """Return the planned peak divided by the measured one."""
    return float(run[OURS]["planned_bytes"] / run[OURS]["device_bytes"])


GOALS = [goal for gib in (16, 24) for goal in goals_for(gib)]

CASE = ("shape", "context", "generations", "rank", "device", "gib", "gpu")
Rows = list[dict[str, Any]]


def newest_cases(rows: Rows) -> dict[tuple[str, ...], Rows]:
    """Return the newest row of each stage of every case, in the order of the stages."""
    cases: dict[tuple[str, ...], Rows] = {}
    for row in newest(rows, *CASE, "stage").values():
        cases.setdefault(tuple(str(row.get(name)) for name in CASE), []).append(row)
    order = list(STAGES)
    return {case: sorted(found, key=lambda row: order.index(row["stage"])) for case, found in cases.items()}


def memory_table(rows: Rows) -> list[str]:
    """Return the section with a column for each stage: peaks on device and host; then planned against counted peaks."""
    cases = newest_cases(rows)
    lines = [
        "", "## Memory of a training step: peaks on device / host in GiB, one feature after the other", "",
        "NF4 weights, LoRA on all linears; completions from half the context to all of it. Without a GPU's name: the "
        "real step on fake tensors, which shows the memory of tensors, but not the driver's.", "",
        *tables.markdown(("case", *STAGES, "machine", "commit"), map(case_cells, cases.values())), "",
    ]
    planned = (row for found in cases.values() for row in found if "planned_bytes" in row and "device_bytes" in row)
    return lines + tables.page(planned, PLANNED)


def name_of(row: dict[str, Any]) -> str:
    return f"{row['shape']}, {row['context']:,} x {row['generations']}"


def place(row: dict[str, Any]) -> str:
    return str(row.get("gpu")) if row["device"] == "cuda" else "fake tensors"


def case_cells(rows: Rows) -> list[str]:
    """Return the cells of a case: every stage that was run."""
    by_stage, last = {row["stage"]: row for row in rows}, rows[-1]
    return [name_of(last), *(peaks(by_stage.get(stage)) for stage in STAGES), place(last), last["commit"]]


def peaks(row: dict[str, Any] | None) -> str:
    if row is None or "device_bytes" not in row:
        return str((row or {}).get("error", ""))[:40]
    host = f" / {row['host_bytes'] / GIB:.1f}" if row["host_bytes"] else ""
    return f"{row['device_bytes'] / GIB:.1f}{host}"


PLANNED: tables.Columns = {
    "case": name_of, "planned, GiB": ("planned_bytes", ".2f", GIB),
    "weighed or measured, GiB": ("device_bytes", ".2f", GIB),
    "ratio": lambda row: f"{row['planned_bytes'] / row['device_bytes']:.3f}",
    "planned on the host": ("planned_host_bytes", ".2f", GIB), "weighed": ("host_bytes", ".2f", GIB)}
LONGEST: tables.Columns = {
    "model": lambda row: f"{row['shape']} x {row['generations']}", "bound, GiB": ("gib", "g"),
    "planned": ("planned_context", ","), "fits": ("longest", ","), "peak, GiB": ("device_bytes", ".2f", GIB),
    "host, GiB": ("host_bytes", ".2f", GIB), "does not fit": ("failing", ","), "machine": place, "commit": "commit"}


def longest_table(rows: Rows) -> list[str]:
    """Return the section with the longest context that fitted each model and bound, and the shortest that did not."""
    cases: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        name = tuple(row.get(field) for field in ("shape", "generations", "gib", "device", "gpu"))
        cases.setdefault((*name, row["run"]), []).append(row)
    newest_runs = {name[:-1]: searched(found) for name, found in cases.items()}
    return ["", "## The longest context whose training step fits", "", *tables.page(newest_runs.values(), LONGEST)]


def searched(rows: Rows) -> dict[str, Any]:
    """Return one search as a row: that of the longest context that fitted, without bytes if none did."""
    best = max((row for row in rows if row["fits"]), key=lambda row: row["context"], default={})
    failing = min((row["context"] for row in rows if not row["fits"]), default=None)
    sizes = dict.fromkeys(("device_bytes", "host_bytes"))
    return rows[-1] | sizes | best | {"longest": best.get("context"), "failing": failing}
