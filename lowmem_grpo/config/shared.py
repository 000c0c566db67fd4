"""The settings that every trainer has."""

import json
import math
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from lowmem_grpo import utils
from lowmem_grpo.config.launcher import ProcessArguments
from lowmem_grpo.config.unsupported import ONE_MEANING, CheckedCall, field_names, refuse, suggestion
from lowmem_grpo.memory.plan import OPTIMIZER_BYTES
from lowmem_grpo.utils import (
    COUNT,
    POSITIVE,
    TRUTH,
    ZERO_OR_MORE,
    Rule,
    check_ranges,
    count_text,
    field_value,
    number,
    one_of,
    require,
)

SCHEDULERS = ("linear", "cosine", "constant", "constant_with_warmup", "cosine_with_restarts", "polynomial",
              "inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay")
SINKS = ("none", "all", "wandb", "tensorboard", "trackio")
MOST = 1_000_000  # completions of a step; more are a typing error
NAMES: Rule = ("a name, or a list of names", lambda value: value is None or isinstance(value, str | list | tuple))
REPO_NAME: Rule = ("OWNER/NAME, or a NAME of your own",
                   lambda value: isinstance(value, str) and bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", value)))
NOT_THE_TEMPLATES = ("tools", "messages", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict",
                     "return_tensors", "padding", "truncation", "max_length", "documents")
TEMPLATE_VARIABLES: Rule = (f"a dict of the chat template's own variables, without {', '.join(NOT_THE_TEMPLATES)}",
                            lambda value: isinstance(value, dict) and value.keys().isdisjoint(NOT_THE_TEMPLATES))
STRATEGIES = ("no", "steps", "epoch")
BARE = {"nargs": "?", "const": True}  # metadata: to such a parser, the bare name of the field means True
if TYPE_CHECKING:
    JsonDict = dict[str, Any]
else:
    JsonDict = dict[str, Any] | str  # argument parsers pass its JSON text
LOG_LEVELS = ("passive", "debug", "info", "warning", "error", "critical")


def of_json(value: Any) -> Any:
    """Return the parsed content of a JSON text; any other text or value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


@dataclass
class TrainSettings(ProcessArguments, metaclass=CheckedCall):
    """The fields that every trainer has. Each means what it means in TRL; fields that TRL does not have say so."""

    evaluated: ClassVar[str] = "loss"  # the evaluation metric that ranks checkpoints by default
    sides: ClassVar[int] = 1  # completions that per_device_train_batch_size counts as one: a pair's two
    READ_ONCE: ClassVar[tuple[str, ...]] = (
        "output_dir", "seed", "data_seed", "shuffle_dataset", "max_steps", "num_train_epochs", "report_to", "optim",
        "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "embedding_learning_rate",
        "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_type", "lr_scheduler_kwargs",
        "warmup_steps", "warmup_ratio")
    """Not a field: settings that a trainer reads when it is made, and never again."""
    home: ClassVar[str] = ""
    """Not a field: the folder in which the trainer was made, to which relative paths belong."""

    output_dir: str = "outputs"
    overwrite_output_dir: bool = False
    run_name: str | None = None
    seed: int = 42

    # data
    shuffle_dataset: bool = True
    """True shuffles the rows anew in each epoch, seeded by `data_seed`; False keeps their order."""
    data_seed: int | None = None
    """Seed that shuffles the rows; None: `seed`."""
    chat_template_kwargs: JsonDict | None = None

    # how much
    max_steps: int = -1
    num_train_epochs: float = 3.0
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    max_tokens_per_micro_batch: int | None = None
    """Not in TRL: maximum tokens of a micro-batch; None: the memory plan's number, if there is a plan."""
    logits_chunk: int | None = None
    """Not in TRL: number of tokens whose logits are in memory at a time; None: chosen for the device's memory."""

    # optimizer
    learning_rate: float = 1e-6
    embedding_learning_rate: float | None = None
    """Unsloth's: the learning rate of embedding and head, or of rows of them, trained beside LoRA; None: as LoRA's."""
    optim: str = "adamw_torch_fused"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: JsonDict | None = None
    """Arguments of the scheduler, a dict or its JSON text, such as {"min_lr_rate": 0.1} for "cosine_with_min_lr"."""
    warmup_steps: float = 0
    """Number of warmup steps or, below 1, their share of all steps, as in transformers 5."""
    warmup_ratio: float = 0.0

    # precision and memory
    bf16: bool | None = None
    """Mixed precision in bfloat16, for a model in float32. On a CPU with AMX, products with frozen weights round their
    factors to bfloat16 and add in float32; else autocast."""
    fp16: bool | None = field(default=None, metadata=BARE)
    gradient_checkpointing: bool | None = field(default=None, metadata=BARE)
    """True recomputes activations in the backward pass, False keeps them; None: as get_peft_model set it up."""
    disable_dropout: bool = False
    """True sets all dropout of the model to 0, including LoRA's."""
    use_cpu: bool = False
    """True loads a model given by name on the CPU, and refuses a loaded model that is on another device."""

    trust_remote_code: bool = False
    """Only False is allowed: code from a model repository is never run."""

    # records and checkpoints
    logging_steps: int = 1
    logging_first_step: bool = False
    log_level: str = "passive"
    """Level of this package's log; "passive" leaves the level as it is."""
    report_to: str | list[str] = "none"  # a list once checked
    disable_tqdm: bool | None = None
    """True turns off the live view, which None and False show."""
    preflight: bool = True
    """Not in TRL: True checks before the first step for mistakes that would stop or spoil the run (docs/checks.md), and
    reports on the first two steps. False does neither."""
    nonfinite_steps: int = 3
    """Not in TRL: stop after this many consecutive steps that were skipped because of NaN or infinity in rewards,
    log-probabilities or gradients. Their rollouts are in nonfinite.jsonl."""
    save_strategy: str = "steps"
    save_steps: int = 100
    save_total_limit: int | None = 3
    eval_strategy: str = "no"
    eval_steps: int | None = None
    eval_on_start: bool = False
    metric_for_best_model: str | None = None
    """Evaluation metric that ranks checkpoints, with or without the prefix eval_. None: "reward" in GRPO and "loss" in
    SFT with load_best_model_at_end; otherwise GRPO's mean training reward, and no metric in SFT."""
    greater_is_better: bool | None = None
    """True if a higher metric_for_best_model is better; None: True, unless the metric's name ends with "loss"."""
    load_best_model_at_end: bool = False
    """True loads the best checkpoint's adapter after the last step, and saves it in the folder `adapter`."""
    model_init_kwargs: JsonDict | None = None
    """Options for loading a model that is given to a trainer by name: dtype, revision, token, device_map; a dict or its
    JSON text."""
    push_to_hub: bool = False
    """True uploads the adapter of a finished run to the hub; a missing repository is created, as a private one."""
    hub_model_id: str | None = None
    """Repository as OWNER/NAME, or NAME for the account of `hf auth login`; None: the name of output_dir."""
    project: str = "huggingface"
    """The project in trackio; `run_name` is the run's name in it."""
    trackio_space_id: str | None = None
    """The Space on the hub that trackio writes to; None: it writes on this machine only."""

    RANGES: ClassVar[dict[str, Rule]] = {
        "output_dir": utils.PATH, "seed": utils.SEED,
        "max_steps": number("a whole number above 0, or -1 to go by num_train_epochs",
                            lambda value: value % 1 == 0 and (value > 0 or value == -1)),
        "num_train_epochs": POSITIVE, "per_device_train_batch_size": COUNT, "gradient_accumulation_steps": COUNT,
        "max_tokens_per_micro_batch": COUNT, "logits_chunk": COUNT,
        "lr_scheduler_kwargs": utils.OF_KINDS[dict], "model_init_kwargs": utils.OF_KINDS[dict],
        "chat_template_kwargs": TEMPLATE_VARIABLES, "learning_rate": ZERO_OR_MORE,
        "embedding_learning_rate": POSITIVE, "optim": one_of(*OPTIMIZER_BYTES),
        "adam_beta1": utils.DECAY, "adam_beta2": utils.DECAY, "adam_epsilon": ZERO_OR_MORE,
        "weight_decay": ZERO_OR_MORE, "max_grad_norm": (f"{POSITIVE[0]} (1e9 clips nothing)", POSITIVE[1]),
        "lr_scheduler_type": one_of(*SCHEDULERS), "warmup_steps": ZERO_OR_MORE, "warmup_ratio": utils.SHARE,
        "logging_steps": COUNT, "nonfinite_steps": COUNT, "save_strategy": one_of(*STRATEGIES), "save_steps": COUNT,
        "save_total_limit": COUNT, "eval_strategy": one_of(*STRATEGIES), "eval_steps": COUNT,
        **dict.fromkeys(("greater_is_better", "load_best_model_at_end", "push_to_hub", "disable_dropout", "use_cpu",
                         "logging_first_step", "eval_on_start"), TRUTH),
        "log_level": one_of(*LOG_LEVELS), "hub_model_id": REPO_NAME,
    }
    """What a field's value must be; a subclass has its own table for the fields that it adds."""

    def __post_init__(self) -> None:
        require("report_to", self.report_to, NAMES)
        if isinstance(self.output_dir, str | os.PathLike):
            self.output_dir = os.path.expanduser(self.output_dir)
        self.report_to = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or ["none"])
        self.lr_scheduler_type = str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))
        for name in ("lr_scheduler_kwargs", "chat_template_kwargs", "model_init_kwargs"):
            setattr(self, name, of_json(getattr(self, name)))
        for name in ("optim", "save_strategy", "eval_strategy"):
            setattr(self, name, str(getattr(getattr(self, name), "value", getattr(self, name))))
        check_ranges(self)
        self.check_combinations()

    def check_combinations(self) -> None:
        """Raise ValueError for settings that contradict each other."""
        for sink in self.report_to:
            if sink not in SINKS:
                raise ValueError(f"report_to names {sink!r}; allowed are {', '.join(SINKS)}")
        if len(self.report_to) > 1 and "all" in self.report_to:
            raise ValueError(f"report_to is {self.report_to}; 'all' stands by itself")
        if self.completions_per_step > MOST:
            raise ValueError(f"per_device_train_batch_size ({self.per_device_train_batch_size}) and "
                             f"gradient_accumulation_steps ({self.gradient_accumulation_steps}) make a step of "
                             f"{count_text(self.completions_per_step, 'completion')}; at most {MOST:,} are allowed. "
                             "Lower them")
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 are both set; set one of them")
        if self.warmup_ratio and self.warmup_steps:
            raise ValueError("warmup_ratio and warmup_steps are both set; set one of them")
        if self.eval_strategy == "steps" and self.eval_steps is None:
            self.eval_steps = self.logging_steps  # transformers' rule
        self.check_best()

    def check_best(self) -> None:
        """Raise ValueError for `load_best_model_at_end` unless each saved checkpoint is evaluated as well."""
        if not self.load_best_model_at_end:
            return
        if self.eval_strategy == "no" or self.eval_strategy != self.save_strategy:
            raise ValueError("load_best_model_at_end=True needs eval_strategy='steps' and save_strategy='steps', or "
                             "'epoch' for both")
        if self.save_strategy == "steps" and self.save_steps % (self.eval_steps or 1):
            raise ValueError(f"load_best_model_at_end=True, and save_steps ({self.save_steps}) is no multiple of "
                             f"eval_steps ({self.eval_steps}): a checkpoint would have no metric of its own")

    @property
    def order_seed(self) -> int:
        """The seed that shuffles the rows."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def best_metric(self) -> str | None:
        """The name of the evaluation metric that ranks checkpoints; None if no evaluation metric ranks them."""
        name = self.metric_for_best_model or (self.evaluated if self.load_best_model_at_end else None)
        return name if name is None or name.startswith("eval_") else f"eval_{name}"

    def is_better(self, value: float, than: float | None) -> bool:
        """Return whether a value of `best_metric` is better than `than`; any value is better than None or NaN."""
        return than is None or than != than or (value > than if self.rises else value < than)

    @property
    def rises(self) -> bool:
        """True if a higher value of `best_metric` is better."""
        greater = self.greater_is_better
        return not str(self.best_metric).endswith("loss") if greater is None else greater

    def name_best(self) -> None:
        """Fill in the fields about ranking checkpoints, because transformers' callbacks read only these fields."""
        if self.best_metric is not None:
            self.greater_is_better = self.rises
            self.metric_for_best_model = self.metric_for_best_model or self.evaluated

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field, but refuse values that the constructor would refuse: scripts also set options one by one."""
        name = type(self).renamed.get(name, name)
        table = type(self).unsupported
        if name in table and (name in ONE_MEANING or name not in field_names(type(self))):
            refuse({name: value}, table, (), type(self).__name__)
        super().__setattr__(name, field_value(type(self), name, value))

    def __getattr__(self, name: str) -> Any:
        """Return the value in effect for an option without a field; other libraries' callbacks read such options."""
        fixed = type(self).unsupported.get(name)
        if fixed is None:
            advice = "; set the fields themselves" if name.startswith("set_") else suggestion(
                name, field_names(type(self)))
            raise AttributeError(f"{type(self).__name__} has no option {name!r}{advice}")
        return fixed.allowed(name)[0]

    def group_settings(self, modules: Iterable[str]) -> dict[str, dict[str, float]]:
        """Return settings of the optimizer, such as `lr`, for the modules that are trained beside LoRA, by their names.
        ValueError if `embedding_learning_rate` is set and there are none."""
        rate = self.embedding_learning_rate
        settings = {module: {} if rate is None else {"lr": rate} for module in modules}
        if rate is not None and not settings:
            raise ValueError(f"embedding_learning_rate is {rate}, and the model trains LoRA alone: name embed_tokens "
                             "and lm_head in get_peft_model's modules_to_save, or leave it out")
        return settings

    @property
    def batch_size(self) -> int:
        """Rows or completions that the settings ask for in one optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def total_steps(self, rows: int | None) -> int:
        """Return the optimizer steps of a run on `rows` rows. ValueError for a stream (None) without `max_steps`."""
        if self.max_steps > 0:
            return self.max_steps
        if rows is None:
            raise ValueError("the rows are a stream, which has no length: set max_steps, the number of optimizer steps")
        return math.ceil(self.num_train_epochs * self.steps_of_epoch(rows))

    def steps_of_epoch(self, rows: int) -> int:
        """Return the optimizer steps of a pass over `rows` rows, of which the last one may have fewer rows."""
        return max(1, math.ceil(rows / self.batch_size))

    def epochs_of(self, rows: int | None) -> int:
        """Return how many passes over `rows` rows a run begins, as transformers counts; sys.maxsize for a stream."""
        if rows is None or self.max_steps <= 0:
            return sys.maxsize if rows is None else math.ceil(self.num_train_epochs)
        return math.ceil(self.max_steps / self.steps_of_epoch(rows))

    @property
    def completions_per_step(self) -> int:
        return self.batch_size

    @property
    def completions_per_prompt(self) -> int:
        return 1

    @property
    def passes(self) -> int:
        """Passes over the groups of an update, each with its own optimizer steps."""
        return 1

    def reference_share(self, step: int) -> float:
        """Return the policy's share in the KL reference's next weights after this step; 0: the reference stays."""
        return 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for records and checkpoints, without access tokens of the hub."""
        made = asdict(self)
        for options in ("model_init_kwargs", "teacher_model_init_kwargs"):
            if made.get(options):
                made[options] = {name: str(value) for name, value in made[options].items()
                                 if name not in ("token", "use_auth_token")}
        return made
