"""Settings of TRL and transformers, recognised by their class without an import, read field by field into ours. A field
counts as set if it differs from that library's default; one that we lack is refused if it was set. Where defaults
differ, theirs are taken over (`TAKEN_OVER`), or not (`DIFFERENT` says what happens instead)."""

import logging
from dataclasses import fields
from typing import Any, TypeVar

from lowmem_grpo.config.shared import TrainSettings, field_names

logger = logging.getLogger(__name__)
CLASSES = {  # (library, class) -> our class that it is read into
    ("trl", "GRPOConfig"): "GRPOConfig", ("trl", "SFTConfig"): "SFTConfig", ("trl", "RLOOConfig"): "RLOOConfig",
    ("transformers", "TrainingArguments"): "TrainSettings",
}
TAKEN_OVER = ("learning_rate", "logging_steps", "save_steps", "max_length", "truncation_mode", "assistant_only_loss")
DIFFERENT = {  # fields whose different default is not taken over: what happens instead
    "output_dir": "records go to ours", "bf16": "the model's own precision",
    "gradient_checkpointing": "as get_peft_model set it up", "disable_tqdm": "the live view is on",
    "shuffle_dataset": "each epoch has its own order", "save_total_limit": "the newest three checkpoints are kept",
    "vllm_importance_sampling_correction": "on where the sampler's log-probabilities differ",
    "vllm_importance_sampling_mode": "each token has its own weight",
    "vllm_gpu_memory_utilization": "0.5, as the model's weights are part of it",
    "vllm_importance_sampling_clip_max": "2, as suits weights of tokens",
}
COMPUTED = ("use_cpu", "generation_batch_size")  # generation_batch_size follows from steps_per_generation

Settings = TypeVar("Settings", bound=TrainSettings)


def settings_of(settings: Any, ours: type[Settings]) -> Settings:
    """Return the settings as `ours`, converted from another library's class; TypeError or ValueError if impossible."""
    if settings is None:
        return ours()
    if isinstance(settings, ours):
        return settings
    base = origin_of(settings)
    if base is None or CLASSES[known_as(base)] not in (ours.__name__, "TrainSettings"):
        raise TypeError(f"args is a {type(settings).__module__}.{type(settings).__name__}; allowed are {ours.__name__} "
                        f"of lowmem_grpo, trl.{ours.__name__} and transformers.TrainingArguments")
    return converted(settings, base, ours)


def is_settings(value: Any) -> bool:
    """Return whether a value is a trainer's settings object of ours, of TRL or of transformers."""
    return isinstance(value, TrainSettings) or origin_of(value) is not None


def origin_of(settings: Any) -> Any:
    """Return the most specific known class that a settings object comes from; None for anything else."""
    return next((cls for cls in type(settings).__mro__ if known_as(cls) in CLASSES), None)


def known_as(cls: type) -> tuple[str, str]:
    """Return the library and the name of a class."""
    return cls.__module__.partition(".")[0], cls.__name__


def converted(settings: Any, base: Any, ours: type[Settings]) -> Settings:
    """Return our settings with the values of a settings object of the class `base`; log the defaults that differ."""
    usual = base(use_cpu=True)  # without use_cpu, the classes refuse machines without a card
    options: dict[str, Any] = {"use_cpu": settings.use_cpu}
    for name in (field.name for field in fields(settings) if field.name not in COMPUTED):
        value = plain(getattr(settings, name))
        if value != plain(getattr(usual, name, None)) or (name in TAKEN_OVER and name in field_names(ours)):
            options[name] = value
    config = ours(**options)
    told = "; ".join(f"{name}: {words}" for name, words in DIFFERENT.items() if name not in options
                     and plain(getattr(usual, name, None)) not in (None, getattr(config, name, None)))
    logger.warning("args is a %s.%s; where it is at its defaults, these differ here: %s", *known_as(base), told)
    return config


def plain(value: Any) -> Any:
    """Return an enumeration's value, the dictionary of an object that has one, or the value itself."""
    value = getattr(value, "value", value)
    return value.to_dict() if hasattr(value, "to_dict") else value
