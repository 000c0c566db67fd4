"""What a recipe takes on a card of a size: model, context, LoRA and settings that fit. The CPU has a preset too."""

import logging
import re
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.recipes.options import TINY, RecipeOptions
from lowmem_grpo.units import GIB

CPU = "cpu"
SIZES = ("16", "24", "48", "80")  # GiB
FULL = 0.9  # of its nominal size a card reports at least

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preset:
    """A model with what it needs."""

    model: str
    max_seq_length: int
    lora_rank: int
    lora_alpha: int
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of GRPOConfig that differ from the recipe's."""


Presets = dict[str, Preset]  # by size in GiB, or CPU; one for CPU alone serves every machine


@dataclass(frozen=True)
class Setup:
    """A recipe's options, the preset and the recipe's settings made into one."""

    model: str
    max_seq_length: int
    lora_rank: int
    lora_alpha: int
    load_in_4bit: bool
    fast_inference: bool | str
    checkpointing: bool | str
    resume: bool
    config: GRPOConfig

    @property
    def is_tiny(self) -> bool:
        """Whether this is the embedded model, which knows arithmetic alone."""
        return self.model == TINY


def prepare(options: RecipeOptions, defaults: dict[str, Any], presets: Presets) -> Setup:
    """What a run takes: the recipe's `defaults` (fields of GRPOConfig), then the preset's, then what was asked by name.
    ValueError for a card size without a preset and for settings that GRPOConfig refuses."""
    size, preset = choose(options.gpu, presets)
    name = either(options.model, preset.model)
    if size == CPU and name != preset.model:
        preset = smallest(presets)  # the CPU's is for a look with the tiny model: another model gets a real run's
    rank = either(options.lora_rank, preset.lora_rank)
    four_bit = either(options.load_in_4bit, name != TINY)
    settings = defaults | preset.settings | options.config
    if preset is not presets.get(CPU):
        settings |= without_card(preset, name, four_bit, settings, options)
    return Setup(
        name, either(options.max_seq_length, preset.max_seq_length), rank,
        either(options.lora_alpha, preset.lora_alpha * rank // preset.lora_rank), four_bit, options.fast_inference,
        options.checkpointing, options.resume, GRPOConfig(**settings),
    )


def without_card(
    preset: Preset, model: str, four_bit: bool, settings: dict[str, Any], options: RecipeOptions
) -> dict[str, Any]:
    """What changes where a card's preset is taken and there is no card, which is said: a paged optimizer, unless it was
    asked for by name, has nothing to page out of."""
    import torch

    if torch.cuda.is_available():
        return {}
    optim = str(settings.get("optim", ""))
    plain = {"optim": optim.removeprefix("paged_")} if optim.startswith("paged_") and "optim" not in options.config \
        else {}
    logger.warning(
        "no card here: the CPU takes the settings of a card's preset (for %s), with %s, %s weights%s; that can be slow",
        preset.model, model, "4-bit" if four_bit else "16-bit",
        f" and optim={plain['optim']} in place of {optim}" if plain else "",
    )
    return plain


def either(asked: T | None, default: T) -> T:
    """What was asked for, a 0 too, which is then refused by whom it concerns; else the default."""
    return default if asked is None else asked


def choose(gpu: str, presets: Presets) -> tuple[str, Preset]:
    """The size and the preset for `gpu`: a size in GiB, "cpu", or "auto", what this machine holds. ValueError names
    the sizes there are."""
    size = fitting_size(presets) if gpu == "auto" else re.sub(r"(?i)\s*gi?b$", "", gpu)
    if size not in presets:
        raise ValueError(f"gpu is {gpu!r}; allowed are auto, {', '.join(presets)}")
    return size, presets[size]


def smallest(presets: Presets) -> Preset:
    """That of the smallest card, or of the CPU where there is no other."""
    return next((presets[size] for size in SIZES if size in presets), presets[CPU])


def fitting_size(presets: Presets) -> str:
    """The largest size that fits this machine's card; CPU without a card, and where there is no other preset."""
    import torch

    sizes = [size for size in SIZES if size in presets]
    if not sizes or not torch.cuda.is_available():
        return CPU
    gib = torch.cuda.get_device_properties(0).total_memory / GIB
    fitting = [size for size in sizes if gib >= FULL * int(size)]
    if not fitting:
        raise ValueError(f"this card has {gib:.1f} GiB; the smallest preset is for {sizes[0]} (choose with gpu=...)")
    return fitting[-1]
