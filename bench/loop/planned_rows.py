"""Print the table of docs/plan.md that compares planned seconds with those of all committed rows of our providers on a
known card.

    python -m bench.loop.planned_rows
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from bench.common.rows import RESULTS, read_rows
from bench.common.targets import OURS
from bench.loop.inputs import loop_shape
from bench.rollout.shapes import LORA_RANK, SHAPES, Shape
from lowmem_grpo.memory import cards, time_plan
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.plan import RunSettings, Workload
from lowmem_grpo.memory.planner import plan
from lowmem_grpo.memory.time_plan import TimePlan, plan_time

ENGINES = ("vllm", "transformers")
HEAD = """| run | model, engine, layers | sampling | training | rest | step |
|---|---|---|---|---|---|"""
# the providers with our own engine, and the weights with which they sampled in all rows
OWN = {f"{OURS}_transformers": "4bit", f"{OURS}_16bit": "16bit"}
# what the code of rows before this day launched, its host's waits, and its passes over logits; today's does less
CHANGED, THEN = "2026-11-30", {
    "LAUNCHES_FORWARD": 36, "LAUNCHES_BACKWARD": 88, "LAUNCHES_AGAIN": 30, "LAUNCHES_DEQUANTIZE": 0,
    "SAMPLER_US": {"vllm": (150.0, 18.0), "transformers": (200.0, 0.0)}, "SAMPLER_PASSES": dict.fromkeys(ENGINES, 30)}
PARTS = {"sampling": ("generate",), "training": ("train", "optimizer")}  # a phase: the phases of a row


def of_its_day(row: dict[str, Any], wide: bool) -> AbstractContextManager[None]:
    """Return a context in which the plan counts what the code of a row launched; `wide` if it sampled in 16 bits."""
    before = THEN | {"LAUNCHES_DECODE": {"transformers": 18, "vllm": 22 if wide else time_plan.LAUNCHES_DECODE["vllm"]}}
    return patch.multiple(time_plan, **(before if row["date"] < CHANGED else {}))


def planned(size: Shape, card: str, engine: str, **settings: Any) -> TimePlan:
    """Return the planned seconds of a step with random weights, all completions being equally long."""
    config = {"model_type": "llama", **size.config}
    asked = RunSettings(size.context, size.n, LORA_RANK, completions_per_step=size.sequences, engine=engine,
                        sequences=size.sequences, optim="adamw_torch_fused", **settings)
    work = Workload(size.prompts, size.n, size.prompt_tokens, size.completion_tokens, size.completion_tokens)
    chosen = plan(config, asked, cards.device(card))
    if engine == "vllm":  # which slept in all rows
        chosen = replace(chosen, settings=replace(chosen.settings, sleeps=True))
    return plan_time(chosen, ModelShape.from_config(config), work)


def of_loop(row: dict[str, Any], card: str) -> list[str]:
    """Return the cells of a whole step. A row with layer inputs on the host recomputed all layers."""
    own, again = OWN.get(row["provider"]), bool(row["planned"]["host_bytes"])
    with of_its_day(row, wide=own != "4bit"):
        time = planned(loop_shape(row["shape"], row["prompts"]), card, "transformers" if own else "vllm",
                       checkpointing="offload" if again else "auto", sampling_weights=own)
    found = {phase: sum(row["phases"][part] for part in parts) for phase, parts in PARTS.items()}
    wanted = {"sampling": time.generate_seconds or 0.0, "training": time.train_seconds or 0.0}
    found["rest"], wanted["rest"] = (total - sum(each.values()) for total, each in (
        (row["seconds"], found), (time.step_seconds or 0.0, wanted)))
    found["step"], wanted["step"] = row["seconds"], time.step_seconds or 0.0
    engine = f"our engine in {own[:-3]} bits" if own else "vLLM"
    case = f"3B, {engine}, {'recomputed' if again else 'kept'}"
    return [row["run"], case, *(seconds(found[phase], wanted[phase]) for phase in found)]


def of_rollout(row: dict[str, Any], card: str) -> list[str]:
    """Return the cells of sampling alone, in 4 bits; a row's p50 is tokens per second."""
    with of_its_day(row, wide=False):
        time = planned(SHAPES[row["shape"]], card, "vllm", checkpointing="auto", sampling_weights="4bit")
    return [row["run"], "8B, vLLM in 4 bits", seconds(row["tokens"] / row["p50"], time.generate_seconds or 0.0),
            "", "", ""]


def seconds(found: float, wanted: float) -> str:
    return f"{found:.2f} / {wanted:.2f} = {found / wanted:.2f}"


def table() -> str:
    """Return the table, in the order of the rows."""
    lines: list[list[str]] = []
    for name, compare in (("loop", of_loop), ("rollout", of_rollout)):
        for row in read_rows(RESULTS / f"{name}.jsonl"):
            card = cards.card_of(row.get("gpu") or "")
            if card is not None and row["provider"] in (OURS, *OWN):
                lines.append(compare(row, card))
    return "\n".join([HEAD, *(f"| {' | '.join(cells)} |" for cells in lines)])


if __name__ == "__main__":
    print(table())
