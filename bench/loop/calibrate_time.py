"""Compare planned seconds with measured ones, by card and phase, in the committed rows of whole steps.

    python -m bench.loop.calibrate_time

prints what `CALIBRATION` in lowmem_grpo/memory/time_plan.py should hold. It uses rows of results/loop.jsonl that have
planned seconds and come from a card whose data sheet is known. Planned seconds in a row are those
before calibration, so that no factor is counted twice.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Any

from bench.common.rows import RESULTS, read_rows
from lowmem_grpo.memory.cards import card_of

PHASES = {"generate": ("generate",), "train": ("train", "optimizer")}  # a phase of the plan: the phases of a row


def rows() -> list[dict[str, Any]]:
    return read_rows(RESULTS / "loop.jsonl")


def factors(found: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return {card: {phase: median of measured over planned}}, to two digits."""
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in found:
        card, planned = card_of(row.get("gpu") or ""), row.get("planned_seconds")
        if card is None or not planned:
            continue
        for phase, parts in PHASES.items():
            measured = sum(row["phases"].get(part, 0.0) for part in parts)
            ratios[card][phase].append(measured / planned[phase])
    return {card: {phase: round(median(values), 2) for phase, values in phases.items()}
            for card, phases in ratios.items()}


if __name__ == "__main__":
    print(json.dumps(factors(rows()), indent=2))
