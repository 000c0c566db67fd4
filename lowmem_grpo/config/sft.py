"""The settings of supervised fine-tuning, under TRL's field names and meanings (TRL 1.16's SFTConfig)."""

from dataclasses import dataclass
from typing import ClassVar

from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.config.unsupported import EVERY_TRAINER, Fixed, at_default, only
from lowmem_grpo.rules import COUNT, Rule

PACKED = "Sequences are always packed, without padding and without seeing each other; leave it out."
FIXED: dict[str, Fixed] = {
    **EVERY_TRAINER,
    **only("Rows are {'prompt', 'completion'} or {'messages'}: a single text does not say which part of it is the "
           "answer.", dataset_text_field="text"),
    **only("Shape the dataset yourself.", dataset_kwargs=(None, {})),
    **only("Prompts are never trained; leave it out.", completion_only_loss=(None, True)),
    **only("Only the last message is trained: split a conversation into one row for each answer.",
           assistant_only_loss=False),
    **only("Rows longer than max_length are skipped and counted, never cut; leave it out.", truncation_mode=None),
    **only("Set tokenizer.chat_template.", chat_template_path=None),
    **only("Set tokenizer.eos_token; answers end as the chat template ends them, else with it.", eos_token=None),
    **only("Use max_length, its newer name.", max_seq_length=None),
    **only("Only prompt, completion and messages are read from a row.", remove_unused_columns=(True, False)),
    **only(PACKED, pad_token=None, pad_to_multiple_of=("auto", None), packing=(True, False),
           padding_free=(True, False), eval_packing=(None, True, False), packing_strategy="bfd"),
    **only("The loss is the mean of -log p over the step's completion tokens, computed in chunks; there is no other.",
           loss_type=("nll", "chunked_nll")),
    **at_default("Smoothing is not supported; leave it out.", "label_smoothing_factor"),
    **only("Pass use_gradient_checkpointing='offload' to get_peft_model.", activation_offloading=False),
    **at_default("Evaluation is packed as training is; use per_device_train_batch_size.",
                 "per_device_eval_batch_size"),
}


@dataclass
class SFTConfig(TrainSettings):
    """Every field means what it means in TRL; fields that TRL does not have say so.

    One optimizer step uses `batch_size` rows, and its loss is the mean over all their completion tokens. On a card
    the memory plan cuts it into micro-batches of at most `max_tokens_per_micro_batch` tokens. Where there is no plan
    (on the CPU), a micro-batch also holds at most `per_device_train_batch_size` rows. The gradient depends on neither.
    """

    output_dir: str = "outputs/sft"
    learning_rate: float = 2e-5
    max_length: int | None = None
    """Rows whose prompt and completion have more tokens are skipped and counted; None is the model's context."""

    unsupported = FIXED  # what `CheckedCall` refuses by
    RANGES: ClassVar[dict[str, Rule]] = {"max_length": COUNT}
