"""Command-line options of a recipe, `key=value` or `--key value`. A value has the type of the dataclass field `key`."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import click
from pydantic import TypeAdapter, ValidationError

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.shared import of_json
from lowmem_grpo.utils import COUNT, POSITIVE, Rule, at_least, check_ranges, number, up_to

NONE_IS_A_CHOICE = ("scale_rewards",)
SECRET = re.compile("(^|_)(key|token|secret|password)$")  # names of options that no file may keep
MOST_ROWS = 1_000_000  # most rows that a recipe generates
KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text",
                         list: "numbers or texts with commas between them", dict: "a JSON object"}
IN_A_FILE = "a value that only a recipe file can give"


@dataclass
class RecipeOptions:
    """The options of every recipe, in addition to the fields of GRPOConfig."""

    gpu: str = "auto"
    """The preset: a card size in GB (8, 16, 24, 48, 80), "cpu", or "auto" for the largest that fits this machine."""
    model: str | None = None
    """A hub model, a folder, or an embedded model ("tiny", "tiny-games", "tiny-talks", "tiny-inbox" or "tiny-shapes").
    None: the preset's model."""
    load_in_4bit: bool | None = None
    """Load the base model in 4 bits. None: False for an embedded model or with load_in_fp8=True, otherwise True."""
    load_in_fp8: bool = False
    """Load the base model in FP8 with a scale for each row, which takes twice the memory of 4 bits."""
    engine: str = "auto"
    """The engine that samples: "vllm", "transformers", or "auto" (vLLM if it is installed, supports the model, and the
    GPU is newer than a T4)."""
    kv_cache_dtype: str = "auto"
    """The dtype of vLLM's KV cache: "auto" (the model's dtype), "fp8" or "fp8_e5m2". FP8 takes half the memory of 16
    bits."""
    card_share: float = 1.0
    """The share of the GPU's memory that this run may use. Choose less than 1 if other programs need the rest."""
    max_seq_length: int | None = None
    """The maximum number of tokens in prompt and completion together. None: the preset's value."""
    lora_rank: int | None = None
    """The LoRA rank. None: the preset's rank."""
    lora_alpha: int | None = None
    """The LoRA alpha. None: lora_rank times the preset's ratio of alpha to rank."""
    gradient_checkpointing_mode: str = "auto"
    """Gradient checkpointing: "none", "device" (layer inputs stay on the GPU), "offload" (layer inputs move to host
    memory) or "auto": "none" for embedded models, else "offload" for the layers whose activations do not fit."""
    resume: bool = False
    """Continue the run in `output_dir` from its last checkpoint."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of GRPOConfig that differ from the recipe's settings."""

    settings: ClassVar[type[Any]] = GRPOConfig  # the class of the run's settings
    OF_MACHINE: ClassVar[tuple[str, ...]] = ()  # a recipe's options that say nothing of its problems
    RANGES: ClassVar[dict[str, Rule]] = {
        "card_share": number("above 0 and at most 1", lambda value: 0 < value <= 1), "max_seq_length": at_least(2),
        "lora_rank": COUNT, "lora_alpha": POSITIVE, **dict.fromkeys(("train_size", "eval_problems"), up_to(MOST_ROWS)),
    }

    @property
    def of_recipe(self) -> dict[str, Any]:
        """The options that the recipe alone has, as its run records them: files as absolute paths, and no keys."""
        others = {entry.name for entry in fields(RecipeOptions)} | {*self.OF_MACHINE}
        own = {entry.name: getattr(self, entry.name) for entry in fields(self)
               if entry.name not in others and not SECRET.search(entry.name)}
        return {name: str(Path(value).absolute()) if isinstance(value, str) and Path(value).is_file() else value
                for name, value in own.items()}

    @property
    def fast_inference(self) -> bool | str:
        """`fast_inference` of from_pretrained. Raises ValueError for an unknown engine."""
        if self.engine not in ("auto", "transformers", "vllm"):
            raise ValueError(f"engine is {self.engine!r}; allowed: auto, transformers, vllm")
        if self.engine != "auto":
            return self.engine
        from torch import cuda  # imported only now: a misspelled option is refused at once

        return cuda.is_available() or "transformers"

    @property
    def checkpointing(self) -> bool | str:
        """`use_gradient_checkpointing` of get_peft_model. Raises ValueError for an unknown mode."""
        modes: dict[str, bool | str] = {"none": False, "device": True, "offload": "offload", "auto": "auto"}
        if self.gradient_checkpointing_mode not in modes:
            allowed = ", ".join(modes)
            raise ValueError(f"gradient_checkpointing_mode is {self.gradient_checkpointing_mode!r}; allowed: {allowed}")
        return modes[self.gradient_checkpointing_mode]


@dataclass
class ProblemOptions(RecipeOptions):
    """The options of recipes whose problems are generated."""

    train_size: int = 4096
    """The number of training problems."""
    eval_problems: int = 256
    """The number of held-out problems (or games) in each evaluation, before and after training."""


def parse(arguments: list[str]) -> dict[str, str]:
    """Parse ["key=value"], ["--key", "value"] or ["--key=value"] to {"key": "value"}; click.UsageError for others."""
    options: dict[str, str] = {}
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            if not word.startswith("--") or not waiting:
                raise click.UsageError(f"cannot read {word!r}: write key=value or --key value")
            value = waiting.pop(0)
        options[name.replace("-", "_")] = value
    return options


def fill(options: type[RecipeOptions], arguments: list[str]) -> Any:
    """Return a recipe's options from the command line; click.UsageError or ValueError for wrong names or values."""
    own = {f.name for f in fields(options)} - {"config"}
    texts = parse(arguments)
    settings = {name: typed(options, name, value) for name, value in texts.items() if name in own}
    known = {f.name for f in fields(options.settings)}
    for name in texts:
        if name not in own | known:
            close = difflib.get_close_matches(name, own | known, n=3)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise click.UsageError(f"no option {name!r}{hint}")
    check_ranges(options, settings)
    config = {name: typed(options.settings, name, value) for name, value in texts.items() if name in known - own}
    return options(**settings, config=config)


def recalled(options: type[RecipeOptions], recorded: Mapping[str, Any], arguments: Sequence[str]) -> Any:
    """Return a recipe's options as a run recorded them, except for those that `arguments` change. ValueError or
    click.UsageError for wrong values."""
    asked = {name: typed(options, name, text) for name, text in parse([*arguments]).items()}
    values = usable(options, recorded) | asked
    check_ranges(options, values)
    return options(**values)


def usable(options: type[RecipeOptions], recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a run's recorded options that the recipe has; ValueError for a value of another type."""
    hints, own = get_type_hints(options), {entry.name for entry in fields(options)}
    try:
        return {name: TypeAdapter(hints[name]).validate_python(value) for name, value in recorded.items()
                if name in own}
    except ValidationError as error:
        raise ValueError(f"the options in the run's summary.json cannot be used: {error}") from error


def typed(owner: type, name: str, text: str) -> Any:
    """Return `text` converted to the field's type. "null" is None, and so is "none" unless in NONE_IS_A_CHOICE."""
    hint = get_type_hints(owner)[name]
    adapter: TypeAdapter[Any] = TypeAdapter(hint)
    if text.lower() == "null" or (text.lower() == "none" and name not in NONE_IS_A_CHOICE):
        try:
            return adapter.validate_python(None)
        except ValidationError:
            pass  # the field cannot be None: check the text itself
    if bool in get_args(hint) and text.lower() in ("true", "false"):  # for bool | str, which would keep the text
        return text.lower() == "true"
    several = "list[" in str(hint) or (hint is Any and "," in text)
    takes_json = any(get_origin(kind) is dict for kind in get_args(hint))
    value: Any = text.split(",") if several else of_json(text) if takes_json else text
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise click.UsageError(f"{name} is {text!r}; it must be {in_words(hint)}") from error


def in_words(hint: Any) -> str:
    kinds = [hint] if get_origin(hint) in (None, list) else get_args(hint)
    words = [KINDS.get(get_origin(kind) or kind, IN_A_FILE) for kind in kinds if kind is not NoneType]
    return ", or ".join([*words, *(["none"] if NoneType in kinds else [])])
