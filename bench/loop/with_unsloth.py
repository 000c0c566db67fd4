"""Unsloth's steps: its 4-bit model, its vLLM on the same weights, and TRL's trainer as it patches it."""

import os
from typing import Any

from bench.loop.phase_watch import PhaseWatch
from bench.loop.processes import TARGETS
from bench.rollout.shapes import LORA_RANK


def run(options: Any, watch: PhaseWatch, outputs: str) -> dict[str, Any]:
    """Unsloth's steps, by its defaults where ours have no counterpart."""
    if options.gib is not None:  # its way to let the cache go while it trains, which must be said before the import
        os.environ["UNSLOTH_VLLM_STANDBY"] = "1"
    import torch
    import unsloth  # first: it patches what the others import

    from bench.loop.inputs import engine_share
    from bench.loop.with_trl import settings, train

    size = options.size
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        model_name=str(options.folder), max_seq_length=size.context, load_in_4bit=True, fast_inference=True,
        max_lora_rank=LORA_RANK, dtype=torch.bfloat16,
        gpu_memory_utilization=engine_share(size, True, options.gib),
    )
    model = unsloth.FastLanguageModel.get_peft_model(
        model, r=LORA_RANK, lora_alpha=LORA_RANK, lora_dropout=0, target_modules=TARGETS,
        use_gradient_checkpointing="unsloth", random_state=0,
    )
    config = settings(options, outputs, use_vllm=True, four_bit=True)
    for name in ("vllm_enable_sleep_mode", "vllm_max_model_length", "shuffle_dataset"):
        config.pop(name)  # the engine is made above, and its GRPOConfig may be of an older TRL
    found = train(options, watch, model, tokenizer, config)
    found["config"]["weights"] = "nf4"
    return found
