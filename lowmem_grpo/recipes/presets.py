"""Presets of a recipe: the model, context, LoRA and settings for each size of card, and for the CPU."""

import logging
import re
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.loading import TRANSFORMERS, VLLM, form_of_weights
from lowmem_grpo.config.sampling import longest_prompt
from lowmem_grpo.memory.cards import Device
from lowmem_grpo.memory.plan import OPTIMIZER_BYTES, MemoryPlan, RunSettings
from lowmem_grpo.memory.planner import plan
from lowmem_grpo.models.stored_model import EMBEDDED, check_stored, config_of, resolve
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.utils import GIB

CPU = "cpu"
SIZES = ("8", "16", "24", "48", "80")  # GB
OTHER_MODELS = (  # newer models, each of which fits every recipe's preset from 16 GB on: `run NAME model=...`
    "HuggingFaceTB/SmolLM3-3B", "Qwen/Qwen3.5-4B", "google/gemma-4-E4B-it", "allenai/Olmo-3-7B-Instruct",
    "mistralai/Ministral-3-8B-Instruct-2512-BF16", "Qwen/Qwen3.5-9B",
)
USUAL: dict[str, Any] = {  # DEFAULTS of most recipes, where they differ from GRPOConfig's own
    "seed": 0, "learning_rate": 1e-5, "gradient_accumulation_steps": 8, "loss_type": "dr_grpo", "scale_rewards": "none",
    "adam_beta2": 0.99, "max_grad_norm": 0.2, "save_steps": 25, "save_total_limit": 2,
}
FULL = 0.9  # a card reports at least this share of its nominal size

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preset:
    """A model, and the settings that fit it on a card."""

    model: str
    max_seq_length: int
    lora_rank: int
    lora_alpha: int
    settings: dict[str, Any] = field(default_factory=dict)  # fields of GRPOConfig that differ from the recipe's
    load_in_4bit: bool = True  # of hub models


Presets = dict[str, Preset]  # by size in GB, or CPU; a recipe with only a CPU preset uses it on every machine


def on_cards(context: int) -> Presets:
    """Return the usual presets for all card sizes, with `context` tokens for prompt and completion together."""
    return {
        "8": Preset("Qwen/Qwen2.5-1.5B-Instruct", context, 32, 64, {"optim": "paged_adamw_8bit"}),
        "16": Preset("Qwen/Qwen2.5-1.5B-Instruct", context, 32, 64, {"optim": "paged_adamw_8bit"}),
        "24": Preset("Qwen/Qwen2.5-3B-Instruct", context, 32, 64, {"optim": "paged_adamw_8bit"}),
        "48": Preset("Qwen/Qwen2.5-7B-Instruct", context, 32, 64, {"optim": "paged_adamw_8bit"}),
        "80": Preset("meta-llama/Llama-3.1-8B-Instruct", context, 64, 128, {"optim": "adamw_8bit"}),
    }


@dataclass(frozen=True)
class Setup:
    """The settings of a run, merged from the recipe's defaults, the preset and the options."""

    model: str
    max_seq_length: int
    lora_rank: int
    lora_alpha: int
    load_in_4bit: bool
    load_in_fp8: bool
    kv_cache_dtype: str
    card_share: float
    fast_inference: bool | str
    checkpointing: bool | str
    resume: bool
    config: GRPOConfig
    options: dict[str, Any]  # those that the recipe alone has

    @property
    def weights(self) -> str:
        """The form of the base model's weights, in words."""
        import torch

        plain = self.load_in_4bit or self.load_in_fp8 or torch.cuda.is_available()
        return weights(self.load_in_4bit, self.load_in_fp8) if plain else "32-bit"

    @property
    def is_tiny(self) -> bool:
        return self.model in EMBEDDED

    def tiny_note(self, lack: str) -> str:
        """Return a recipe's note on what the embedded tiny model cannot learn; empty for other models."""
        return f"The embedded tiny model {lack}: this run only shows that everything works." if self.is_tiny else ""


def prepare(options: RecipeOptions, defaults: dict[str, Any], presets: Presets) -> Setup:
    """Return the settings of a run: options override the preset, which overrides `defaults`. ValueError for a card size
    without a preset, and for settings that GRPOConfig refuses."""
    preset = preset_for(options, presets, options.gpu)
    name = either(options.model, preset.model)
    rank = either(options.lora_rank, preset.lora_rank)
    form_of_weights(options.load_in_4bit, False, options.load_in_fp8)  # raises ValueError for both
    four_bit = either(options.load_in_4bit, preset.load_in_4bit and name not in EMBEDDED and not options.load_in_fp8)
    form = weights(four_bit, options.load_in_fp8)
    checkpointing = False if name in EMBEDDED and options.checkpointing == "auto" else options.checkpointing
    settings = defaults | preset.settings | options.config
    if preset is not presets.get(CPU):
        settings |= without_card(preset, name, form, settings, options)
    return Setup(name, either(options.max_seq_length, preset.max_seq_length), rank,
                 either(options.lora_alpha, preset.lora_alpha * rank // preset.lora_rank), four_bit,
                 options.load_in_fp8, options.kv_cache_dtype, options.card_share, options.fast_inference,
                 checkpointing, options.resume, options.settings(**settings), options.of_recipe)


def planned(setup: Setup, card: Device) -> MemoryPlan:
    """Return the memory plan of a run on a card, before the model is loaded. ValueError for an unsupported model."""
    config = setup.config
    return plan(config_of(setup.model), RunSettings(
        setup.max_seq_length, config.completions_per_prompt, setup.lora_rank,
        form_of_weights(setup.load_in_4bit, False, setup.load_in_fp8), setup.checkpointing,
        TRANSFORMERS if setup.fast_inference == TRANSFORMERS else VLLM, config.max_tokens_per_micro_batch,
        chunk_rows=config.logits_chunk, kv_cache_dtype=setup.kv_cache_dtype,
        longest_completion=config.max_completion_length, completions_per_step=config.completions_per_step,
        optim=config.optim if config.optim in OPTIMIZER_BYTES else None,
    ), card, setup.model)


def preset_for(options: RecipeOptions, presets: Presets, gpu: str) -> Preset:
    """Return the preset for a card or the CPU, and for the model in the options."""
    size, preset = choose(gpu, presets)
    if size == CPU and preset.model in EMBEDDED and either(options.model, preset.model) != preset.model:
        # such a preset is a short trial of the tiny model: other models get a full run, as on the smallest card
        return next((presets[card] for card in SIZES if card in presets), presets[CPU])
    return preset


def check_setup(options: RecipeOptions, defaults: dict[str, Any], presets: Presets) -> None:
    """Raise ValueError if every preset that may be chosen would fail. Does not use torch."""
    chosen = [preset_for(options, presets, gpu) for gpu in (presets if options.gpu == "auto" else [options.gpu])]
    faults = [fault(options, defaults, preset) for preset in chosen]
    if faults and all(faults):
        raise ValueError(faults[0])


def fault(options: RecipeOptions, defaults: dict[str, Any], preset: Preset) -> str:
    """Return why a run with this preset would fail; "" if no reason is known before the model is loaded."""
    model, context = either(options.model, preset.model), either(options.max_seq_length, preset.max_seq_length)
    try:
        config = options.settings(**(defaults | preset.settings | options.config))
        longest_prompt(config.max_prompt_length, config.max_completion_length, context)
        check_stored(resolve(model), model, None, context, vision=True)
        if getattr(config, "use_vllm", False) and options.engine == TRANSFORMERS:
            return "use_vllm=true and engine=transformers contradict each other; leave one of them out"
        if (rate := config.embedding_learning_rate) is not None and "embedding_learning_rate" not in defaults:
            return (f"embedding_learning_rate is {rate}, and this recipe trains LoRA alone: leave it out, or give it "
                    "in the DEFAULTS of a recipe of your own that trains an embedding")
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def without_card(
    preset: Preset, model: str, form: str, settings: dict[str, Any], options: RecipeOptions
) -> dict[str, Any]:
    """Return the settings to change if a CPU uses a card's preset: a CPU has no paged optimizers. Log a warning."""
    import torch

    if torch.cuda.is_available():
        return {}
    optim = str(settings.get("optim", ""))
    plain = {"optim": optim.removeprefix("paged_")} if optim.startswith("paged_") and "optim" not in options.config \
        else {}
    logger.warning(
        "There is no card here: the CPU uses the preset of a card (for %s), with %s, %s weights%s. This can be slow.",
        preset.model, model, form,
        f" and optim={plain['optim']} instead of {optim}" if plain else "",
    )
    return plain


def mixed_on_cpu(options: RecipeOptions) -> dict[str, Any]:
    """Return bf16=True for a CPU with AMX, on which this is faster, unless the user chose or the model is embedded. Log
    what it means."""
    import torch

    from lowmem_grpo.models.card_check import has_amx

    chose = options.model in EMBEDDED or bool({"bf16", "fp16"} & set(options.config))
    if chose or torch.cuda.is_available() or not has_amx():
        return {}
    logger.warning("This CPU has AMX: products with frozen weights round their factors to bfloat16 (bf16=true), which "
                   "is faster. bf16=false computes in float32.")
    return {"bf16": True}


def weights(four_bit: bool, in_fp8: bool) -> str:
    return "4-bit" if four_bit else "FP8" if in_fp8 else "16-bit"


def either(asked: T | None, default: T) -> T:
    """Return `asked`, or the default if it is None. A 0 is kept, so that it can be refused later."""
    return default if asked is None else asked


def size_of(gpu: str) -> str:
    """Return a card size as presets name it: in GB, without the unit."""
    return re.sub(r"(?i)\s*gi?b$", "", gpu)


def choose(gpu: str, presets: Presets) -> tuple[str, Preset]:
    """Return (size, preset) for a size in GB, "cpu", or "auto"; ValueError for a size without a preset."""
    size = fitting_size(presets) if gpu == "auto" else size_of(gpu)
    if size not in presets:
        raise ValueError(f"gpu is {gpu!r}; allowed are auto, {', '.join(presets)}")
    return size, presets[size]


def fitting_size(presets: Presets) -> str:
    """Return the largest preset size that fits this machine's card; CPU if there is no card, or no preset for cards.
    ValueError for a card below the smallest preset."""
    import torch

    sizes = [size for size in SIZES if size in presets]
    if not sizes or not torch.cuda.is_available():
        return CPU
    gib = torch.cuda.get_device_properties(0).total_memory / GIB
    fitting = [size for size in sizes if gib >= FULL * int(size)]
    if not fitting:
        raise ValueError(f"this card has {gib:.1f} GiB; the smallest preset is for {sizes[0]} (choose with gpu=...)")
    return fitting[-1]
