"""The settings of supervised fine-tuning, under TRL's field names and meanings (TRL 1.16's SFTConfig)."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.config.unsupported import EVERY_TRAINER, RENAMED, Table, any_value, at_default, only
from lowmem_grpo.utils import COUNT, TRUTH, Rule, one_of

TEMPLATE: Rule = ("a file of a chat template, such as template.jinja; to take the template of another model, set "
                  "tokenizer.chat_template",
                  lambda value: isinstance(value, str) and Path(value).expanduser().is_file())

FIXED: Table = EVERY_TRAINER | {
    **only("Rows are tokenised when they are needed, as their columns say; shape the dataset yourself.",
           dataset_kwargs=(None, {}, {"skip_prepare_dataset": True}, {"skip_prepare_dataset": False})),
    **only("Only the columns that are trained on are read from a row.", remove_unused_columns=(True, False)),
    **only("Sequences are always packed, without padding and without seeing each other; leave it out.", pad_token=None,
           padding_free=(True, False), num_of_sequences=(None, 1024), chars_per_token=(None, 3.6)),
    **any_value("dataset_batch_size", usual=1000),
    **at_default("Smoothing is not supported; leave it out.", "label_smoothing_factor"),
    **only("What layers keep waits on the host unless use_gradient_checkpointing says otherwise in get_peft_model.",
           activation_offloading=(False, True)),
    **any_value("per_device_eval_batch_size", usual=8),  # an evaluation is packed as training is
}


@dataclass
class SFTConfig(TrainSettings):
    """Every field means what it means in TRL; fields that TRL does not have say so.

    One optimizer step uses `batch_size` rows, and its loss is the mean over all their completion tokens. On a card the
    memory plan cuts the step into micro-batches of at most `max_tokens_per_micro_batch` tokens. Without a plan (on the
    CPU), a micro-batch also holds at most `per_device_train_batch_size` rows. Neither limit changes the gradient.
    """

    output_dir: str = "outputs/sft"
    learning_rate: float = 2e-5
    max_length: int | None = None
    """Maximum tokens of a row; longer ones are cut as `truncation_mode` says. None: the model's context."""
    truncation_mode: str | None = "keep_start"
    """How rows longer than `max_length` are treated: "keep_start" cuts off their end, "keep_end" their beginning, and
    None (not in TRL) skips and counts them."""
    packing: bool = False
    """True packs rows into sequences of `max_length` tokens, which then count as the rows of a batch. False pads
    nothing either: the rows of a step lie side by side and do not attend to each other."""
    packing_strategy: str = "bfd"
    """"bfd" (best fit, longest rows first; rows above `max_length` are cut), "bfd_split" (the part cut off becomes
    another row) or "wrapped" (all tokens in one stream, cut every `max_length`; rows attend to those before them)."""
    eval_packing: bool | None = None
    """True packs evaluation rows; None: as `packing`."""
    loss_type: str = "nll"
    """"nll" (-log p, also named "chunked_nll") or "dft" (-p log p, with p as a constant; arXiv 2508.05629)."""
    chat_template_path: str | None = None
    """Path of a chat template file (.jinja), which replaces the tokenizer's template."""
    eos_token: str | None = None
    """The end token to set in the tokenizer; None keeps its own. It ends answers that no chat template ends."""
    dataset_num_proc: int | None = None
    """Number of processes with which TRL prepares the rows; it changes nothing here."""
    dataset_text_field: str = "text"
    """The column that holds the text of rows that are plain text. All of its tokens are trained, as in TRL."""
    completion_only_loss: bool | None = None
    """For rows with `prompt` and `completion`: None and True train only the completion, False trains both."""
    assistant_only_loss: bool | None = False
    """For rows with `messages`: False trains all tokens, True all messages of the assistant, and None (not in TRL) only
    the assistant's last message."""

    unsupported = FIXED  # the table that `CheckedCall` reads
    renamed = RENAMED | {"max_seq_length": "max_length"}
    RANGES: ClassVar[dict[str, Rule]] = {
        "max_length": COUNT, "truncation_mode": one_of("keep_start", "keep_end"), "completion_only_loss": TRUTH,
        "assistant_only_loss": TRUTH, "loss_type": one_of("nll", "chunked_nll", "dft"),
        "packing_strategy": one_of("bfd", "bfd_split", "wrapped"), "chat_template_path": TEMPLATE,
    }
