"""The settings that every trainer has, and how unknown options are refused."""

import difflib
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from lowmem_grpo.config.unsupported import FIXED, OTHER, RENAMED, Fixed, transformers_defaults
from lowmem_grpo.memory.plan import OPTIMIZER_BYTES
from lowmem_grpo.rules import COUNT, DECAY, POSITIVE, SHARE, ZERO_OR_MORE, Rule, check_ranges, number, one_of

OPTIMIZERS = tuple(OPTIMIZER_BYTES)
SCHEDULERS = ("linear", "cosine", "constant", "constant_with_warmup")
SINKS = ("none", "wandb", "tensorboard")
STRATEGIES = ("no", "steps")


def field_names(cls: Any) -> set[str]:
    """The names of a dataclass's fields."""
    return {field.name for field in fields(cls)}


class CheckedCall(type):
    """Makes `GRPOConfig(...)` refuse unknown options by name, with what to do instead, before the dataclass sees them.

    A class may have its own table of options with one meaning, `unsupported`.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        fixed = getattr(cls, "unsupported", FIXED)
        return super().__call__(*args, **refuse_unsupported(kwargs, field_names(cls), fixed, cls.__name__))


def refuse_unsupported(
    options: dict[str, Any], known: set[str], fixed: dict[str, Fixed], owner: str
) -> dict[str, Any]:
    """The options that are fields. Raises TypeError for one that nobody knows, ValueError for one we cannot honour."""
    kept: dict[str, Any] = {}
    for given, value in options.items():
        name = RENAMED.get(given, given)
        if name != given and name in options:
            raise TypeError(f"{owner} got {given!r} and {name!r}, which are the same option; give one of them")
        if name in known:
            kept[name] = value
            continue
        option = fixed.get(name) or (OTHER if name in transformers_defaults() else None)
        if option is None:
            close = difflib.get_close_matches(name, [*known, *fixed], n=3)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise TypeError(f"{owner} has no option {name!r}{hint}")
        if value not in option.allowed(name):
            allowed = " or ".join(repr(choice) for choice in option.allowed(name))
            raise ValueError(f"{name}={value!r} is not supported (allowed: {allowed}). {option.advice}")
    return kept


@dataclass
class TrainSettings(metaclass=CheckedCall):
    """The fields that every trainer has. Each means what it means in TRL; fields that TRL does not have say so."""

    output_dir: str = "outputs"
    overwrite_output_dir: bool = False
    run_name: str | None = None
    seed: int = 42

    # data
    shuffle_dataset: bool = True
    """Each epoch in its own order, by `seed`; False keeps the order of the rows."""
    chat_template_kwargs: dict[str, Any] | None = None

    # how much
    max_steps: int = -1
    num_train_epochs: float = 3.0
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    max_tokens_per_micro_batch: int | None = None
    """Not in TRL: your own bound on a micro-batch, in tokens. None takes the memory plan's, where there is one."""
    logits_chunk: int | None = None
    """Not in TRL: how many tokens have their logits in memory at a time; None chooses by the device's memory."""

    # optimizer
    learning_rate: float = 1e-6
    optim: str = "adamw_torch"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "linear"
    warmup_steps: float = 0
    """Steps; below 1 it is a share of all steps, as in transformers 5."""
    warmup_ratio: float = 0.0

    # precision and memory
    bf16: bool | None = None
    fp16: bool | None = None
    gradient_checkpointing: bool | None = None
    """None keeps what get_peft_model set up."""

    # records and checkpoints
    logging_steps: int = 1
    report_to: Any = "none"  # str | list[str]; a list once checked
    disable_tqdm: bool | None = None
    """True turns the live view off."""
    preflight: bool = True
    """Not in TRL: before the first step, look for what would stop or spoil the run (docs/preflight.md), and after the
    first two steps report how they went. False checks nothing and reports nothing."""
    nonfinite_steps: int = 3
    """Not in TRL: stop after this many steps in a row that were skipped for NaN or infinity in rewards,
    log-probabilities or gradients. Their rollouts are in nonfinite.jsonl."""
    save_strategy: str = "steps"
    save_steps: int = 100
    save_total_limit: int | None = 3
    eval_strategy: str = "no"
    eval_steps: int | None = None

    RANGES: ClassVar[dict[str, Rule]] = {
        "max_steps": number("above 0, or -1 to go by num_train_epochs", lambda value: value > 0 or value == -1),
        "num_train_epochs": POSITIVE, "per_device_train_batch_size": COUNT, "gradient_accumulation_steps": COUNT,
        "max_tokens_per_micro_batch": COUNT, "logits_chunk": COUNT,
        "learning_rate": ZERO_OR_MORE, "optim": one_of(*OPTIMIZERS), "adam_beta1": DECAY, "adam_beta2": DECAY,
        "adam_epsilon": ZERO_OR_MORE, "weight_decay": ZERO_OR_MORE, "max_grad_norm": POSITIVE,
        "lr_scheduler_type": one_of(*SCHEDULERS), "warmup_steps": ZERO_OR_MORE, "warmup_ratio": SHARE,
        "logging_steps": COUNT, "nonfinite_steps": COUNT, "save_strategy": one_of(*STRATEGIES), "save_steps": COUNT,
        "save_total_limit": COUNT, "eval_strategy": one_of(*STRATEGIES), "eval_steps": COUNT,
    }
    """What a field's value must be; a subclass has its own table for the fields that it adds."""

    def __post_init__(self) -> None:
        self.report_to = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or ["none"])
        self.lr_scheduler_type = str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))
        self.optim = str(getattr(self.optim, "value", self.optim))
        check_ranges(self)
        self.check_combinations()

    def check_combinations(self) -> None:
        """Settings that contradict each other are refused, never changed in silence."""
        for sink in self.report_to:
            if sink not in SINKS:
                raise ValueError(f"report_to names {sink!r}; allowed are {', '.join(SINKS)}")
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 are both set; set one of them")
        if self.warmup_ratio and self.warmup_steps:
            raise ValueError("warmup_ratio and warmup_steps are both set; set one of them")
        if self.eval_strategy == "steps" and self.eval_steps is None:
            self.eval_steps = self.logging_steps  # transformers' rule

    @property
    def batch_size(self) -> int:
        """Rows or completions that one optimizer step is asked to use."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def total_steps(self, rows: int) -> int:
        """Optimizer steps of a whole run on a dataset of so many rows."""
        if self.max_steps > 0:
            return self.max_steps
        return max(1, math.ceil(self.num_train_epochs * rows / self.batch_size))

    @property
    def completions_per_step(self) -> int:
        """Completions behind one optimizer step."""
        return self.batch_size

    @property
    def completions_per_prompt(self) -> int:
        return 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for records and checkpoints."""
        return asdict(self)
