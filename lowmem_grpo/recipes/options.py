"""Command-line options of a recipe: `key=value` or `--key value`, typed by the dataclass field they name."""

import difflib
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

import click
from pydantic import TypeAdapter, ValidationError

from lowmem_grpo.config.grpo import GRPOConfig

TINY = "tiny"  # the model that ships with the package, which a CPU trains in minutes
NONE_IS_A_CHOICE = ("scale_rewards",)


@dataclass
class RecipeOptions:
    """What every recipe has beside the fields of GRPOConfig."""

    gpu: str = "auto"
    """Which preset: the card's size in GiB (16, 24, 48, 80), "cpu", or "auto", the largest that this machine holds."""
    model: str | None = None
    """A hub name, a folder, or "tiny", the embedded model; None is the preset's."""
    load_in_4bit: bool | None = None
    """None is 4 bit for all but the embedded model."""
    engine: str = "auto"
    """What samples: "transformers", "vllm", or "auto": vLLM where it is installed and there is a card."""
    max_seq_length: int | None = None
    """Tokens of prompt and completion; None is the preset's."""
    lora_rank: int | None = None
    """None is the preset's."""
    lora_alpha: int | None = None
    """None is the preset's; where lora_rank is another one, in proportion."""
    gradient_checkpointing_mode: str = "offload"
    """What get_peft_model takes, by name: "none", "device" or "offload"."""
    resume: bool = False
    """Go on with the run in output_dir, from its last checkpoint."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of GRPOConfig that differ from the recipe's."""

    @property
    def fast_inference(self) -> bool | str:
        """What from_pretrained takes; ValueError names what is allowed."""
        if self.engine not in ("auto", "transformers", "vllm"):
            raise ValueError(f"engine is {self.engine!r}; allowed: auto, transformers, vllm")
        if self.engine != "auto":
            return self.engine
        from torch import cuda  # loaded only now: a misspelt option is refused at once

        return cuda.is_available() or "transformers"

    @property
    def checkpointing(self) -> bool | str:
        """`use_gradient_checkpointing` of get_peft_model; ValueError names what is allowed."""
        modes: dict[str, bool | str] = {"none": False, "device": True, "offload": "offload"}
        if self.gradient_checkpointing_mode not in modes:
            allowed = ", ".join(modes)
            raise ValueError(f"gradient_checkpointing_mode is {self.gradient_checkpointing_mode!r}; allowed: {allowed}")
        return modes[self.gradient_checkpointing_mode]


def parse(arguments: list[str]) -> dict[str, str]:
    """{"key": "value"} of ["key=value", "--key", "value", "--key=value"]; click.UsageError for anything else."""
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
    """An instance of a recipe's options from the command line; unknown names and wrong values are click.UsageErrors."""
    own = {f.name for f in fields(options)} - {"config"}
    given = parse(arguments)
    settings = {name: typed(options, name, value) for name, value in given.items() if name in own}
    known = {f.name for f in fields(GRPOConfig)}
    for name in given:
        if name not in own | known:
            close = difflib.get_close_matches(name, own | known, n=3)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise click.UsageError(f"no option {name!r}{hint}")
    config = {name: typed(GRPOConfig, name, value) for name, value in given.items() if name in known - own}
    return options(**settings, config=config)


def typed(owner: type, name: str, text: str) -> Any:
    """`text` as the type of the field `name`; "null" is None where the field allows it, and so is "none" but where it
    is a choice of its own."""
    hint = get_type_hints(owner)[name]
    adapter: TypeAdapter[Any] = TypeAdapter(hint)
    if text.lower() == "null" or (text.lower() == "none" and name not in NONE_IS_A_CHOICE):
        try:
            return adapter.validate_python(None)
        except ValidationError:
            pass  # the field has no None: let the text itself be judged
    several = "list[" in str(hint) or (hint is Any and "," in text)
    value: Any = text.split(",") if several else text
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        wanted = getattr(hint, "__name__", str(hint))
        raise click.UsageError(f"{name}={text!r}: {error.errors()[0]['msg']} (type {wanted})") from error
