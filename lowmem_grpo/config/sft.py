"""The settings of supervised fine-tuning, under TRL's field names and meanings (TRL 1.16's SFTConfig)."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from lowmem_grpo.config import unsupported
from lowmem_grpo.config.grpo import OPTIMIZERS, RANGES, SCHEDULERS, SINKS, STRATEGIES, CheckedCall
from lowmem_grpo.config.unsupported import Fixed, group, off

AT_LEAST_ONE = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "logging_steps", "max_length", "eval_steps",
    "max_tokens_per_micro_batch", "logits_chunk", "nonfinite_steps",
)
MAY_BE_NONE = ("max_length", "eval_steps", "max_tokens_per_micro_batch", "logits_chunk")

# Options whose advice is about GRPO, or that only its rollouts have.
FOR_GRPO = (
    "num_completions_to_print", "log_unique_prompts", "wandb_log_unique_prompts", "log_completions_hub_repo",
    "log_multimodal",
)
COMMON = {
    **unsupported.MODEL, **unsupported.UNSLOTH, **unsupported.OPTIMIZER, **unsupported.PRECISION_AND_MEMORY,
    **unsupported.DATA, **unsupported.RECORDS, **unsupported.EVALUATION, **unsupported.CHECKPOINTS,
    **unsupported.DEVICES, **unsupported.TRANSFORMERS_4,
}
PACKED = "Sequences are always packed, without padding and without seeing each other; leave it out."
DATA = {
    "dataset_text_field": off("text", "Rows are {'prompt', 'completion'} or {'messages'}: a text alone does not say "
                              "which part of it is the answer."),
    "dataset_kwargs": off(None, "Shape the dataset yourself.", {}),
    "completion_only_loss": Fixed((None, True), "Prompts are never trained; leave it out."),
    "assistant_only_loss": off(False, "The last message alone is trained: split a conversation into one row for each "
                               "answer."),
    "truncation_mode": off(None, "Rows longer than max_length are skipped and counted, never cut; leave it out."),
    "chat_template_path": off(None, "Set tokenizer.chat_template."),
    "eos_token": off(None, "Set tokenizer.eos_token; answers end as the chat template ends them, else with it."),
    "pad_token": off(None, PACKED),
    "max_seq_length": off(None, "Use max_length, its newer name."),
    "pad_to_multiple_of": off("auto", PACKED, None),
    "remove_unused_columns": Fixed((True, False), "Columns beside prompt, completion and messages are not read."),
    "label_names": off(None, "Labels are made from the completions; leave it out.", []),
    "packing": Fixed((True, False), PACKED), "padding_free": Fixed((True, False), PACKED),
    "eval_packing": Fixed((None, True, False), PACKED), "packing_strategy": off("bfd", PACKED),
}
LOSS = {
    "loss_type": Fixed(("nll", "chunked_nll"), "The loss is the mean of -log p over the step's completion tokens, "
                       "computed in chunks; there is no other."),
    "label_smoothing_factor": off(0.0, "Smoothing is not supported; leave it out."),
    "router_aux_loss_coef": off(None, "No auxiliary loss is added; leave it out.", 0.0),
    "activation_offloading": off(False, "Pass use_gradient_checkpointing='offload' to get_peft_model."),
}
RECORDS = {
    "include_for_metrics": off([], "Loss and entropy are the metrics; leave it out.", None),
    "per_device_eval_batch_size": off(8, "Evaluation is packed as training is; use per_device_train_batch_size."),
    "save_strategy": off("no", "The adapter is saved at the end, and where Ctrl-C stops the run; leave it out."),
    **group(
        "The adapter is saved at the end, and where Ctrl-C stops the run; leave it out.",
        save_steps=None, save_total_limit=None, resume_from_checkpoint=None, load_best_model_at_end=False,
        metric_for_best_model=None, greater_is_better=None, save_only_model=False, ignore_data_skip=False,
        enable_jit_checkpoint=False, restore_callback_states_from_checkpoint=False,
    ),
    **group("Loss and entropy are the only metrics of an evaluation; leave it out.",
            prediction_loss_only=False, batch_eval_metrics=False, include_inputs_for_metrics=False),
    **group("Evaluation keeps two numbers, so there is nothing to gather; leave it out.",
            eval_do_concat_batches=True, eval_use_gather_object=False, eval_accumulation_steps=None),
}
FIXED: dict[str, Fixed] = {
    name: fixed for name, fixed in {**COMMON, **DATA, **LOSS, **RECORDS}.items() if name not in FOR_GRPO
}


@dataclass
class SFTConfig(metaclass=CheckedCall):
    """Every field means what it means in TRL; fields that TRL does not have say so.

    One optimizer step uses `rows_per_step` rows, and its loss is the mean over all their completion tokens. On a card
    the memory plan cuts it into micro-batches of at most `max_tokens_per_micro_batch` tokens. Where there is no plan
    (on the CPU), a micro-batch also holds at most `per_device_train_batch_size` rows. The gradient depends on neither.
    """

    output_dir: str = "outputs/sft"
    overwrite_output_dir: bool = False
    run_name: str | None = None
    seed: int = 42

    # data
    max_length: int | None = None
    """Rows whose prompt and completion have more tokens are skipped and counted; None is the model's context."""
    shuffle_dataset: bool = True
    """Each epoch in an order of its own, by `seed`; False keeps the order of the rows."""
    chat_template_kwargs: dict[str, Any] | None = None

    # how much
    max_steps: int = -1
    num_train_epochs: float = 3.0
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    max_tokens_per_micro_batch: int | None = None
    """Not in TRL: your own bound on a micro-batch, in tokens. None takes the memory plan's, where there is one."""
    logits_chunk: int | None = None
    """Not in TRL: tokens whose logits exist at a time; None chooses by the device's memory."""

    # optimizer
    learning_rate: float = 2e-5
    optim: str = "adamw_torch"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "linear"
    warmup_steps: float = 0
    """Steps; below 1 a share of all steps, as in transformers 5."""
    warmup_ratio: float = 0.0

    # precision and memory
    bf16: bool | None = None
    fp16: bool | None = None
    gradient_checkpointing: bool | None = None
    """None keeps what get_peft_model set up."""

    # records
    logging_steps: int = 1
    report_to: Any = "none"  # str | list[str]; a list once checked
    disable_tqdm: bool | None = None
    """True turns the live view off."""
    preflight: bool = True
    """Not in TRL: look for what a run would stumble over before its first step (docs/preflight.md)."""
    nonfinite_steps: int = 3
    """Not in TRL: stop after this many steps in a row that were skipped for NaN or infinity."""
    eval_strategy: str = "no"
    eval_steps: int | None = None

    # what `CheckedCall` refuses by, and what code shared with GRPO reads
    unsupported = FIXED
    temperature = 1.0
    num_generations = 1  # completions of a prompt

    def __post_init__(self) -> None:
        self.report_to = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or ["none"])
        self.lr_scheduler_type = str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))
        self.optim = str(getattr(self.optim, "value", self.optim))
        self.check_choices()
        self.check_ranges()
        self.check_combinations()

    def check_choices(self) -> None:
        """Each named choice is one of those we have."""
        choices = {"optim": OPTIMIZERS, "lr_scheduler_type": SCHEDULERS, "eval_strategy": STRATEGIES}
        given = [(name, getattr(self, name), allowed) for name, allowed in choices.items()]
        for name, value, allowed in [*given, *(("report_to", sink, SINKS) for sink in self.report_to)]:
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; allowed are {', '.join(allowed)}")

    def check_ranges(self) -> None:
        """Each number lies where it makes sense."""
        for name in AT_LEAST_ONE:
            value = getattr(self, name)
            if value is None and name in MAY_BE_NONE:
                continue
            if value is None or value < 1 or value != int(value):
                raise ValueError(f"{name} is {value}; it must be a whole number, at least 1")
        for name in sorted(RANGES.keys() & {field.name for field in fields(self)}):
            (rule, holds), value = RANGES[name], getattr(self, name)
            if not holds(value):
                raise ValueError(f"{name} is {value}; it must be {rule}")

    def check_combinations(self) -> None:
        """Settings that contradict each other are refused, never mended in silence."""
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 are both set; set one of them")
        if self.warmup_ratio and self.warmup_steps:
            raise ValueError("warmup_ratio and warmup_steps are both set; set one of them")
        if self.max_steps == 0 or self.max_steps < -1:
            raise ValueError(f"max_steps is {self.max_steps}; it must be above 0, or -1 to go by num_train_epochs")
        if self.eval_strategy == "steps" and self.eval_steps is None:
            self.eval_steps = self.logging_steps  # transformers' rule

    @property
    def rows_per_step(self) -> int:
        """Rows behind one optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def completions_per_step(self) -> int:
        """The same, by the name that GRPOConfig has for it: a row has one completion."""
        return self.rows_per_step

    def total_steps(self, rows: int) -> int:
        """Optimizer steps of a run on a dataset of so many rows."""
        if self.max_steps > 0:
            return self.max_steps
        return max(1, math.ceil(self.num_train_epochs * rows / self.rows_per_step))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for records."""
        return asdict(self)
