"""Conversion of the settings and arguments that scripts for TRL and transformers pass to a trainer.

A field of such settings counts as set if it differs from its default in TRL or transformers. A set field that we lack
is refused. For other fields we take that default over (`TAKEN_OVER`) or keep ours (`DIFFERENT`).
"""

import inspect
import logging
import os
from dataclasses import fields, replace
from typing import Any, TypeVar

from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.config.unsupported import field_names, suggestion

logger = logging.getLogger(__name__)
CLASSES = {  # (library, class) -> our class that it is read into
    ("trl", "GRPOConfig"): "GRPOConfig", ("trl", "SFTConfig"): "SFTConfig", ("trl", "RLOOConfig"): "RLOOConfig",
    **{("trl", name): name for name in ("DistillationConfig", "SDPOConfig", "SDFTConfig", "DPOConfig", "ORPOConfig",
                                        "KTOConfig", "RewardConfig")},
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
MEASURED = ("SFTTrainer, DPOTrainer, KTOTrainer and ORPOTrainer take it; of sampled completions compute your own from "
            "model.fast_generate(...), in a callback's on_evaluate")
OWN_LOSS = "the loss is that of the trainer; ARCHITECTURE.md says how to add one"
REFUSED = {  # parameters of their trainers, and what to do instead
    "reward_model": "give it in reward_funcs, as an object or by its name",
    "compute_metrics": MEASURED, "preprocess_logits_for_metrics": MEASURED,
    "compute_loss_func": OWN_LOSS, "compute_loss": OWN_LOSS, "ref_model": "the reference is the model without its "
    "adapter; leave it out", "model_init": "load the model yourself and pass it as model",
    "infinite": "rows are drawn again until max_steps; leave it out",
    "optimizer_cls_and_kwargs": "make the optimizer yourself: optimizers=(optimizer, None)",
    "data_collator": "rows are tokenised and packed here; say what is trained by the columns: prompt and completion, "
                     "messages with assistant_only_loss=True, or input_ids with labels. Images are not supported",
    "formatting_func": "make the columns that the trainer reads with dataset.map(...)",
    "prompt_template": "make the column `prompt` with dataset.map(...)",
}
PADDING = ("DataCollatorForSeq2Seq", "DataCollatorForLanguageModeling", "DataCollatorWithPadding",
           "DataCollatorWithFlattening", "DefaultDataCollator", "default_data_collator",
           "DataCollatorForPreference", "DataCollatorForUnpairedPreference", "DPODataCollatorWithPadding")  # only pad
OUR_ORDER = ("train_dataset", "args", "processing_class", "eval_dataset")
TRLS_ORDER = ("args", "data_collator", "train_dataset", "eval_dataset", "processing_class")

Settings = TypeVar("Settings", bound=TrainSettings)


def settings_of(settings: Any, ours: type[Settings]) -> Settings:
    """Return the settings as an instance of `ours`; TypeError or ValueError if they cannot be converted."""
    if settings is None:
        return ours()
    if isinstance(settings, ours):
        return settings
    base = origin_of(settings)
    if base is None or CLASSES[known_as(base)] not in (ours.__name__, "TrainSettings"):
        theirs = f"trl.{ours.__name__} and " if ("trl", ours.__name__) in CLASSES else ""
        raise TypeError(f"args is a {type(settings).__module__}.{type(settings).__name__}; allowed are {ours.__name__} "
                        f"of lowmem_grpo, {theirs}transformers.TrainingArguments")
    return converted(settings, base, ours)


def origin_of(settings: Any) -> Any:
    """Return the class of TRL or transformers (listed in `CLASSES`) that a settings object comes from, or None."""
    return next((cls for cls in type(settings).__mro__ if known_as(cls) in CLASSES), None)


def known_as(cls: type) -> tuple[str, str]:
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
    """Return the value of an enumeration, the `to_dict()` of an object that has it, or any other value unchanged."""
    value = getattr(value, "value", value)
    return value.to_dict() if hasattr(value, "to_dict") else value


def taken_in(others: dict[str, Any], settings: Settings, trainer: type) -> Settings:
    """Return the settings with a trainer's further arguments `others`; TypeError or ValueError for unsupported ones."""
    kind = type(settings)
    options = {}
    for name, value in others.items():
        if name in REFUSED:
            refuse(name, value, trainer)
        elif name in field_names(kind) or name in kind.unsupported or name in kind.renamed:
            options[kind.renamed.get(name, name)] = value
        else:
            known = [*inspect.signature(trainer).parameters, *REFUSED, *field_names(kind)]
            raise TypeError(f"{trainer.__name__} has no parameter {name!r}{suggestion(name, known)}")
    settings = replace(settings, **options) if options else settings
    vars(settings)["home"] = os.getcwd()  # before rows are read, as a dataset of the user's may change it
    return settings


def with_names(placed: tuple[Any, ...], **named: Any) -> tuple[Any, ...]:
    """Return SFTTrainer's arguments `named`, filled in with the positional arguments `placed`, which are in TRL's order
    if the first is None or settings, else in ours. TypeError for too many arguments, or for one passed twice."""
    first = placed[0] if placed else ()
    order = TRLS_ORDER if first is None or isinstance(first, TrainSettings) or origin_of(first) else OUR_ORDER
    if len(placed) > len(order):
        raise TypeError(f"SFTTrainer got {len(placed) + 1} parameters without names; name those after {order[-1]}")
    for name, value in zip(order, placed, strict=False):
        if named[name] is not None:
            raise TypeError(f"SFTTrainer: {name} is given twice, once by its place and once by its name")
        named[name] = value
    return tuple(named.values())


def refuse(name: str, value: Any, trainer: type) -> None:
    """Raise ValueError unless the value changes nothing: None, an empty list, or a collator that only pads."""
    if value is None or value == [] or (name == "data_collator" and only_pads(value)):
        return
    what = getattr(value, "__name__", type(value).__name__)
    raise ValueError(f"{trainer.__name__}: {name} ({what}) is not supported; {REFUSED[name]}")


def only_pads(collator: Any) -> bool:
    """Return whether a collator of transformers or TRL would only pad rows, which is needless as rows are packed."""
    kind = collator if inspect.isfunction(collator) else type(collator)
    cuts = hasattr(collator, "truncation_mode") and getattr(collator, "max_length", None) is not None
    return (kind.__module__.partition(".")[0] in ("transformers", "trl") and kind.__name__ in PADDING
            and not getattr(collator, "mlm", False) and not cuts)


def check_model(model: Any, trainer: type) -> None:
    """Raise TypeError if a trainer was given no model."""
    if model is None:
        raise TypeError(f"{trainer.__name__} needs model: what FastLanguageModel.get_peft_model returned, a model of "
                        'transformers or of PEFT, or a name, such as "Qwen/Qwen2.5-1.5B-Instruct" or "tiny"')


def either(processing_class: Any, tokenizer: Any) -> Any:
    """Return the tokenizer, passed as `processing_class` or as `tokenizer`; TypeError if both are passed and differ."""
    if processing_class is not None and tokenizer is not None and processing_class is not tokenizer:
        raise TypeError("processing_class and tokenizer are two names of the same; give one of them")
    return tokenizer if processing_class is None else processing_class
