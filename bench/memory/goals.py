"""The numbers that a training step of Llama-3.1-8B should reach on cards of 16 and 24 GiB."""

from bench.common.targets import OURS, ByProvider, Goal
from lowmem_grpo.units import GIB

SHAPE, CONTEXT, STAGE = "llama-3.1-8b", 20480, "+ 8-bit optimizer"


def goals_for(gib: int) -> list[Goal]:
    """It fits, and the planner predicted its peak within 5%."""
    case = f"{SHAPE}, {CONTEXT:,} tokens, {gib} GiB of the card"
    fields = {"device": "cuda", "gib": gib, "shape": SHAPE, "context": CONTEXT, "stage": STAGE}
    return [Goal(case, "fits", gib * GIB, peak, peaks, fields, any_card=True),
            Goal(case, "planned within 5%", 0.05, lambda run: abs(planned(run) - 1),
                 lambda value, run: f"{planned(run):.3f}", fields, any_card=True)]


def peak(run: ByProvider) -> float:
    """Bytes on the card; infinite where memory ran out."""
    return float(run[OURS].get("device_bytes", float("inf")))


def peaks(value: float, run: ByProvider) -> str:
    row = run[OURS]
    if "device_bytes" not in row:
        return str(row.get("error", ""))
    allocated, reserved, used = (row[name] / GIB for name in ("device_bytes", "reserved_bytes", "used_bytes"))
    return f"{allocated:.2f} GiB, {reserved:.2f} reserved, {used:.2f} in use"


def planned(run: ByProvider) -> float:
    """The planned peak divided by the measured one."""
    return float(run[OURS]["planned_bytes"] / run[OURS]["device_bytes"])


GOALS = [goal for gib in (16, 24) for goal in goals_for(gib)]
