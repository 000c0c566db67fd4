"""Parameters of TRL's and transformers' trainers that ours lack: names of settings go into the settings, values without
effect are accepted, and the rest is refused with a remedy."""

import inspect
from dataclasses import replace
from typing import Any, TypeVar

from lowmem_grpo.config.from_trl import is_settings
from lowmem_grpo.config.shared import TrainSettings, field_names
from lowmem_grpo.config.unsupported import suggestion

MEASURED = ("SFTTrainer takes it; of sampled completions compute your own from model.fast_generate(...), in a "
            "callback's on_evaluate")
OWN_LOSS = "the loss is that of the trainer; ARCHITECTURE.md says how to add one"
REFUSED = {
    "reward_model": "give it in reward_funcs, as an object or by its name",
    "compute_metrics": MEASURED, "preprocess_logits_for_metrics": MEASURED,
    "compute_loss_func": OWN_LOSS, "compute_loss": OWN_LOSS, "ref_model": "the reference is the model without its "
    "adapter; leave it out", "model_init": "load the model yourself and pass it as model",
    "infinite": "rows are drawn again until max_steps; leave it out",
    "optimizer_cls_and_kwargs": "make the optimizer yourself: optimizers=(optimizer, None)",
    "data_collator": "rows are tokenised and packed here; say what is trained by the columns: prompt and completion, "
                     "messages with assistant_only_loss=True, or input_ids with labels. Images are not supported",
    "formatting_func": "GRPO samples from the column `prompt`: make it with dataset.map(...)",
    "prompt_template": "make the column `prompt` with dataset.map(...)",
}
PADDING = ("DataCollatorForSeq2Seq", "DataCollatorForLanguageModeling", "DataCollatorWithPadding",
           "DataCollatorWithFlattening", "DefaultDataCollator", "default_data_collator")  # they only pad

OUR_ORDER = ("train_dataset", "args", "processing_class", "eval_dataset")
TRLS_ORDER = ("args", "data_collator", "train_dataset", "eval_dataset", "processing_class")

Settings = TypeVar("Settings", bound=TrainSettings)


def taken_in(others: dict[str, Any], settings: Settings, trainer: type) -> Settings:
    """Return the settings, with those that are among a trainer's `others`; ValueError or TypeError for the rest."""
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
    return replace(settings, **options) if options else settings


def with_names(placed: tuple[Any, ...], **named: Any) -> tuple[Any, ...]:
    """Return SFTTrainer's parameters, with the positional ones (`placed`), in TRL's order if settings come first."""
    order = TRLS_ORDER if placed and (placed[0] is None or is_settings(placed[0])) else OUR_ORDER
    if len(placed) > len(order):
        raise TypeError(f"SFTTrainer got {len(placed) + 1} parameters without names; name those after {order[-1]}")
    for name, value in zip(order, placed, strict=False):
        if named[name] is not None:
            raise TypeError(f"SFTTrainer: {name} is given twice, once by its place and once by its name")
        named[name] = value
    return tuple(named.values())


def refuse(name: str, value: Any, trainer: type) -> None:
    """Raise ValueError unless the value asks for nothing, or for what happens anyway."""
    if value is None or value == [] or (name == "data_collator" and only_pads(value)):
        return
    what = getattr(value, "__name__", type(value).__name__)
    raise ValueError(f"{trainer.__name__}: {name} ({what}) is not supported; {REFUSED[name]}")


def only_pads(collator: Any) -> bool:
    """Return whether a collator of transformers or TRL would only pad rows, which packing makes needless."""
    kind = collator if inspect.isfunction(collator) else type(collator)
    return (kind.__module__.partition(".")[0] in ("transformers", "trl") and kind.__name__ in PADDING
            and not getattr(collator, "mlm", False))


def check_model(model: Any, trainer: type) -> None:
    """Raise TypeError if a trainer was given no model."""
    if model is None:
        raise TypeError(f"{trainer.__name__} needs model: what FastLanguageModel.get_peft_model returned, a model of "
                        'transformers or of PEFT, or a name, such as "Qwen/Qwen2.5-1.5B-Instruct" or "tiny"')


def either(processing_class: Any, tokenizer: Any) -> Any:
    """Return the tokenizer, which may be given under either name; TypeError if both are given and differ."""
    if processing_class is not None and tokenizer is not None and processing_class is not tokenizer:
        raise TypeError("processing_class and tokenizer are two names of the same; give one of them")
    return tokenizer if processing_class is None else processing_class
