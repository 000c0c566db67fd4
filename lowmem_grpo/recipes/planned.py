"""The memory plan of a recipe before its model is loaded: what its setup asks for, in the planner's words."""

from lowmem_grpo.memory.cards import Device
from lowmem_grpo.memory.plan import OPTIMIZER_BYTES, MemoryPlan, RunSettings
from lowmem_grpo.models.named import config_of
from lowmem_grpo.planning.planner import plan
from lowmem_grpo.recipes.presets import Setup


def planned(setup: Setup, card: Device) -> MemoryPlan:
    """The plan of a run on a card. ValueError for a model that no plan can be made for."""
    return plan(config_of(setup.model), settings_of(setup), card, setup.model)


def settings_of(setup: Setup) -> RunSettings:
    """Return the planner's settings for this setup. What only the loaded model knows is left to it."""
    config = setup.config
    engine = "transformers" if setup.fast_inference == "transformers" else "vllm"
    return RunSettings(
        setup.max_seq_length, config.completions_per_prompt, setup.lora_rank, setup.load_in_4bit, setup.load_in_fp8,
        setup.checkpointing, engine, config.max_tokens_per_micro_batch, chunk_rows=config.logits_chunk,
        kv_cache_dtype=setup.kv_cache_dtype, longest_completion=config.max_completion_length,
        optim=config.optim if config.optim in OPTIMIZER_BYTES else None,
        completions_per_step=config.completions_per_step,
    )
