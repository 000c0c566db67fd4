"""Compare planned seconds with measured ones, by card and phase, in the newest committed row of each card and shape.

    python -m bench.loop.calibrate_time

prints what `CALIBRATION` in lowmem_grpo/memory/time_plan.py should hold. It uses rows of results/loop.jsonl of our loop
with vLLM on a card whose data sheet is known, and plans them anew without calibration, so that no factor is counted
twice.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Any

from bench.common.rows import RESULTS, newest, read_rows
from bench.common.targets import OURS
from bench.loop.inputs import loop_shape
from bench.rollout.shapes import LORA_RANK
from lowmem_grpo.memory import cards
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.plan import RunSettings, Workload
from lowmem_grpo.memory.planner import plan
from lowmem_grpo.memory.time_plan import CALIBRATION, plan_time

PHASES = {"generate": ("generate",), "train": ("train", "optimizer")}  # a phase of the plan: the phases of a row


def rows() -> list[dict[str, Any]]:
    return read_rows(RESULTS / "loop.jsonl")


def planned(row: dict[str, Any], card: str) -> dict[str, float]:
    """Return the planned seconds of each phase of a row's step, without calibration."""
    size = loop_shape(row["shape"], row["prompts"])
    config = {"model_type": "llama", **size.config}
    asked = RunSettings(size.context, size.n, LORA_RANK, checkpointing="auto", completions_per_step=size.sequences,
                        sequences=size.sequences, optim="adamw_torch_fused")
    work = Workload(size.prompts, size.n, size.prompt_tokens, size.completion_tokens, size.completion_tokens)
    found = plan_time(plan(config, asked, cards.device(card)), ModelShape.from_config(config), work)
    seconds = {"generate": found.generate_seconds or 0.0, "train": found.train_seconds or 0.0}
    return {phase: value / CALIBRATION.get(card, {}).get(phase, 1.0) for phase, value in seconds.items()}


def factors(found: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return {card: {phase: median of measured over planned}}, to two digits."""
    ours = [row for row in found if row["provider"] == OURS and "phases" in row]
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in newest(ours, "gpu", "shape").values():
        if (card := cards.card_of(row.get("gpu") or "")) is None:
            continue
        seconds = planned(row, card)
        for phase, parts in PHASES.items():
            ratios[card][phase].append(sum(row["phases"].get(part, 0.0) for part in parts) / seconds[phase])
    return {card: {phase: round(median(values), 2) for phase, values in phases.items()}
            for card, phases in ratios.items()}


if __name__ == "__main__":
    print(json.dumps(factors(rows()), indent=2))
