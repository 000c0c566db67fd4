"""The variants of bench/smoke/bench.py, and what must hold of the steps of each."""

import math
from dataclasses import dataclass, field
from typing import Any

LEFT_BYTES = 2 * 2**20  # what a variant may leave on a card after everything was dropped


@dataclass(frozen=True)
class Variant:
    """Options of `from_pretrained`, `get_peft_model` and `GRPOConfig`, added to those that all variants share."""

    load: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    card_only: str | None = None  # why it needs a card
    fills: str = ""  # CACHE or CARD: what is filled after the first rollout

    @property
    def sleeps(self) -> bool:
        """True if vLLM samples, because it sleeps while the trainer works."""
        return self.load.get("fast_inference") == "vllm"


CACHE = "torch's cache"  # holds most of the card, as after a training step; must be emptied before waking
CARD = "the card"  # has room for half of the KV cache, so a smaller one must do
PLAIN: dict[str, Any] = {"use_gradient_checkpointing": True}
OFFLOAD: dict[str, Any] = {"use_gradient_checkpointing": "offload"}
PACKED: dict[str, Any] = {"max_tokens_per_micro_batch": 192}  # a few sequences: several micro-batches a step
EARLY: dict[str, Any] = {"score_while_sampling": True}
HALF: dict[str, Any] = {"dtype": "float16"}
FP16 = "gradients in fp16 are only scaled on a card"
PAGED = "paged states need a card's memory"
SLEEP = "vLLM sleeps only on a card"
LARGE: dict[str, Any] = {"fast_inference": "vllm", "kv_cache_bytes": 4 * 2**30}  # half of it exceeds what graphs take

VARIANTS = {
    "4-bit": Variant(lora=PLAIN),
    "16-bit": Variant({"load_in_4bit": False}, PLAIN),
    "layers kept": Variant(lora={"use_gradient_checkpointing": "auto"}),  # where the plan has room: all of them
    "no checkpointing": Variant(lora={"use_gradient_checkpointing": False}),
    "offload": Variant(lora=OFFLOAD),
    "packing": Variant(lora=PLAIN, config=PACKED),
    "8-bit optimizer": Variant(lora=PLAIN, config={"optim": "adamw_8bit"}),
    "paged 8-bit optimizer": Variant(lora=PLAIN, config={"optim": "paged_adamw_8bit"}, card_only=PAGED),
    "fused optimizer": Variant(lora=PLAIN, config={"optim": "adamw_torch_fused"}),
    "fp16": Variant(HALF, PLAIN, {"fp16": True}, FP16),
    "KL and two passes": Variant(lora=PLAIN, config={"beta": 0.04, "num_iterations": 2}),
    "rewards while sampling": Variant(lora=PLAIN, config=EARLY),
    "untied host embedding": Variant({"offload_embedding": True}, PLAIN),
    "vllm": Variant({"fast_inference": "vllm"}, PLAIN),
    "vllm eager": Variant({"fast_inference": "vllm", "enforce_eager": True}, PLAIN),
    "vllm, rewards while sampling": Variant({"fast_inference": "vllm"}, PLAIN, EARLY),
    "vllm 16-bit": Variant({"fast_inference": "vllm", "load_in_4bit": False}, PLAIN),
    "vllm fp16": Variant({"fast_inference": "vllm", **HALF}, PLAIN, {"fp16": True}, FP16),
    "vllm, all that saves memory": Variant(
        {"fast_inference": "vllm"}, OFFLOAD, {**PACKED, "optim": "paged_adamw_8bit"}, PAGED
    ),
    "vllm wakes beside a full cache": Variant(LARGE, PLAIN, card_only=SLEEP, fills=CACHE),
    "vllm wakes on a full card": Variant(LARGE, PLAIN, card_only=SLEEP, fills=CARD),
}


def complaints(found: dict[str, Any]) -> list[str]:
    """Return what is wrong with a variant's measures, in words."""
    wrong = [f"step {number}: {name} is {step.get(name)}" for number, step in enumerate(found["steps"], 1)
             for name in ("loss", "grad_norm", "entropy") if not math.isfinite(step.get(name, math.nan))]
    for number, step in enumerate(found["steps"], 1):
        if step["groups/with_signal"] and not step["grad_norm"] > 0:
            wrong.append(f"step {number}: rewards differ and the gradient is zero")
        if step["memory/oom_train"] or (step["memory/oom_generate"] and not found.get("fills")):  # else it judges this
            wrong.append(f"step {number}: memory ran out")
    if not found["steps"]:
        wrong.append("no step was recorded")
    if not found["adapter_moved"] > 0:
        wrong.append("the adapter is what it was before the first step")
    if found["left_bytes"] > LEFT_BYTES:
        wrong.append(f"{found['left_bytes']:,} bytes are still allocated after everything was dropped")
    return wrong + list(found["wrong"])
