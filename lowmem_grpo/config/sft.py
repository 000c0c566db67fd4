"""The settings of supervised fine-tuning, under TRL's field names and meanings (TRL 1.16's SFTConfig)."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.config.unsupported import EVERY_TRAINER, RENAMED, Table, any_value, at_default, only
from lowmem_grpo.utils import COUNT, TRUTH, Rule, one_of

TEMPLATE: Rule = ("a file of a chat template, such as template.jinja; to take the template of another model, set "
                  "tokenizer.chat_template", lambda value: isinstance(value, str) and Path(value).is_file())

FIXED: Table = EVERY_TRAINER | {
    **only("Rows are tokenised when they are needed, as their columns say; shape the dataset yourself.",
           dataset_kwargs=(None, {}, {"skip_prepare_dataset": True}, {"skip_prepare_dataset": False})),
    **only("Only the columns that are trained on are read from a row.", remove_unused_columns=(True, False)),
    **only("Sequences are always packed, without padding and without seeing each other; leave it out.", pad_token=None,
           padding_free=(True, False), num_of_sequences=(None, 1024), chars_per_token=(None, 3.6)),
    **any_value("dataset_batch_size", usual=1000),
    **any_value("embedding_learning_rate"),  # embeddings stay frozen: training them is refused
    **at_default("Smoothing is not supported; leave it out.", "label_smoothing_factor"),
    **only("What layers keep waits on the host unless use_gradient_checkpointing says otherwise in get_peft_model.",
           activation_offloading=(False, True)),
    **any_value("per_device_eval_batch_size", usual=8),  # an evaluation is packed as training is
}


@dataclass
class SFTConfig(TrainSettings):
    """Every field means what it means in TRL; fields that TRL does not have say so.

    One optimizer step uses `batch_size` rows, and its loss is the mean over all their completion tokens. On a card
    the memory plan cuts it into micro-batches of at most `max_tokens_per_micro_batch` tokens. Without a plan (on the
    CPU), a micro-batch also holds at most `per_device_train_batch_size` rows. Neither bound changes the gradient.
    """

    output_dir: str = "outputs/sft"
    learning_rate: float = 2e-5
    max_length: int | None = None
    """Rows with more tokens are cut as `truncation_mode` says; None is the model's context."""
    truncation_mode: str | None = "keep_start"
    """What happens to longer rows: "keep_start" cuts their end off, "keep_end" their beginning, and None skips and
    counts them (not in TRL)."""
    packing: bool = False
    """Whether rows are packed into sequences of `max_length` tokens, which then count as the rows of a batch. Without
    it nothing is padded either: rows of a step lie side by side and do not see each other."""
    packing_strategy: str = "bfd"
    """"bfd" (longest first, each where it fits best; longer rows are cut), "bfd_split" (what is cut off is a row of its
    own) or "wrapped" (all tokens in a line, cut at `max_length`; rows see those before them)."""
    eval_packing: bool | None = None
    """Whether evaluation rows are packed; None is as `packing`."""
    loss_type: str = "nll"
    """"nll" (-log p, also named "chunked_nll") or "dft" (-p log p, with p as a constant; arXiv 2508.05629)."""
    chat_template_path: str | None = None
    """A file of a chat template (.jinja), which becomes the tokenizer's."""
    eos_token: str | None = None
    """The tokenizer's end token from now on. Answers end as the chat template ends them, else with it."""
    dataset_num_proc: int | None = None
    """By how many processes TRL reads the rows; any number gives the same here."""
    dataset_text_field: str = "text"
    """The column of rows that are one text. All of it is trained, as in TRL."""
    completion_only_loss: bool | None = None
    """Of rows with `prompt` and `completion`: None and True train the completion, False trains both."""
    assistant_only_loss: bool | None = False
    """Of rows with `messages`: False trains all tokens, True every message of the assistant, and None the assistant's
    last one (not in TRL)."""

    unsupported = FIXED  # the table that `CheckedCall` reads
    renamed = RENAMED | {"max_seq_length": "max_length"}
    RANGES: ClassVar[dict[str, Rule]] = {
        "max_length": COUNT, "truncation_mode": one_of("keep_start", "keep_end"), "completion_only_loss": TRUTH,
        "assistant_only_loss": TRUTH, "loss_type": one_of("nll", "chunked_nll", "dft"),
        "packing_strategy": one_of("bfd", "bfd_split", "wrapped"), "chat_template_path": TEMPLATE,
    }
