"""The settings of training on preferences, under TRL's field names and meanings (TRL 1.16's DPOConfig, ORPOConfig,
KTOConfig and RewardConfig)."""

from dataclasses import dataclass
from typing import ClassVar

from lowmem_grpo.config.grpo import MovingReference
from lowmem_grpo.config.sft import FIXED, TEMPLATE
from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.config.unsupported import LEAVE_OUT, RENAMED, Table, any_value, only
from lowmem_grpo.losses.preference_losses import PreferenceSettings
from lowmem_grpo.utils import COUNT, POSITIVE, TRUTH, ZERO_OR_MORE, Rule, one_of

OF_PREFERENCES: Table = FIXED | {
    **only("Of longer rows the start is kept; rows whose prompt fills max_length are left out.",
           truncation_mode="keep_start"),
    **any_value("precompute_ref_batch_size", "padding_value", "label_pad_token_id"),  # passes are packed
    **any_value("use_logits_to_keep", usual=False),  # logits of prompts are never computed
    **only("Sample with model.fast_generate(...), in a callback's on_evaluate.", generate_during_eval=False),
    **only("Only decoders are trained here; leave it out.", is_encoder_decoder=(None, False)),
    **only("Load one adapter, under its usual name.", model_adapter_name=(None, "default")),
    **only("The reference is the adapter as it is when the trainer is made: load it once, and leave this out.",
           ref_adapter_name=None),
    **only("The model is its own reference, without its adapter or with a copy of it; leave it out.",
           ref_model_init_kwargs=(None, {}), force_use_ref_model=False),
}
OF_DPO: Table = OF_PREFERENCES | {
    **only("Its weights need the distribution of each token, which is never computed whole; leave it out.",
           use_weighting=False),
    **only("For a loss without a reference take ORPOTrainer.", reference_free=False),
    **only("Use loss_type=['sigmoid', 'sft'] with loss_weights=[1.0, rpo_alpha].", rpo_alpha=None),
    **only(LEAVE_OUT, tools=None, base_model_attribute_name="model", use_liger_loss=(False, None, True)),
}
OF_KTO: Table = OF_PREFERENCES | {
    **only("Use shuffle_dataset=True for another order of the rows in each epoch.",
           train_sampling_strategy="sequential"),
}


class RowsOfSides(TrainSettings):
    """Settings of training on rows of several completions."""

    sides: ClassVar[int] = 2

    @property
    def completions_per_prompt(self) -> int:
        return self.sides

    @property
    def completions_per_step(self) -> int:
        return self.sides * self.batch_size


@dataclass
class PreferenceConfig(RowsOfSides):
    """The fields that training on preferences shares; fields that TRL 1.16 does not have say so."""

    max_length: int | None = 1024
    """Maximum tokens of prompt and completion; of longer rows the start is kept. None: the model's context."""
    max_prompt_length: int | None = None
    """As in older versions of TRL: of a longer prompt, only its last tokens are kept. None: no limit of its own."""
    max_completion_length: int | None = None
    """As in older versions of TRL: of a longer completion, only its start is kept. None: no limit of its own."""
    beta: float = 0.1
    disable_dropout: bool = True
    dataset_num_proc: int | None = None
    """Number of processes with which TRL prepares the rows; it changes nothing here."""
    remove_unused_columns: bool = True
    """TRL's; only the columns that are trained on are read, whatever it is."""

    unsupported = OF_PREFERENCES
    renamed = RENAMED | {"max_target_length": "max_completion_length"}
    RANGES: ClassVar[dict[str, Rule]] = {
        **dict.fromkeys(("max_length", "max_prompt_length", "max_completion_length"), COUNT), "beta": POSITIVE,
    }


@dataclass
class ReferredConfig(MovingReference, PreferenceConfig):
    """The fields about the reference: the model without its adapter, or a continued adapter as it was at the start."""

    precompute_ref_log_probs: bool = False
    """True computes the reference's log-probabilities of all rows before the first step, and keeps them on the host."""

    RANGES: ClassVar[dict[str, Rule]] = {"precompute_ref_log_probs": TRUTH}

    def check_combinations(self) -> None:
        super().check_combinations()
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ValueError("sync_ref_model=True moves the reference, and precompute_ref_log_probs=True computes its "
                             "log-probabilities once; leave one of them out")


@dataclass
class DPOConfig(PreferenceSettings, ReferredConfig):
    """TRL's DPOConfig. One optimizer step uses `batch_size` pairs, and its loss is the mean over all of them, however
    they are cut into micro-batches; no pair is cut apart."""

    output_dir: str = "outputs/dpo"

    unsupported = OF_DPO

    def __post_init__(self) -> None:
        ReferredConfig.__post_init__(self)  # the losses are the first base only so that `output_dir` is the first field

    def check_combinations(self) -> None:
        super().check_combinations()
        self.check_loss_options()


@dataclass
class ORPOConfig(PreferenceConfig):
    """TRL's ORPOConfig: -log p of the chosen rows with their prompts, and `beta` times the loss of the odds ratio,
    without a reference."""

    output_dir: str = "outputs/orpo"

    RANGES: ClassVar[dict[str, Rule]] = {"beta": ZERO_OR_MORE}


@dataclass
class KTOConfig(ReferredConfig):
    """TRL's KTOConfig: rows of one completion with its label. The KL term of "kto" reads each completion behind the
    prompt of the next row of its step, so a step needs two rows."""

    output_dir: str = "outputs/kto"
    shuffle_dataset: bool = False
    loss_type: str = "kto"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    unsupported = OF_KTO
    RANGES: ClassVar[dict[str, Rule]] = {
        "loss_type": one_of("kto", "apo_zero_unpaired"),
        **dict.fromkeys(("desirable_weight", "undesirable_weight"), ZERO_OR_MORE),
    }
    sides: ClassVar[int] = 1

    def check_combinations(self) -> None:
        super().check_combinations()
        if self.loss_type == "kto" and self.batch_size < 2:
            raise ValueError("loss_type 'kto' reads each completion behind the prompt of another row, and a step has "
                             "one row; raise per_device_train_batch_size, or take loss_type='apo_zero_unpaired'")


@dataclass
class RewardConfig(RowsOfSides):
    """TRL's RewardConfig. One optimizer step uses `batch_size` pairs, and its loss is the mean over all of them,
    however they are cut into micro-batches; no pair is cut apart."""

    output_dir: str = "outputs/reward"
    learning_rate: float = 1e-4
    max_length: int | None = 1024
    """Maximum tokens of prompt and completion. Rows with a longer side are left out. None: the model's context."""
    center_rewards_coefficient: float | None = None
    """The weight of the square of the sum of both scores, which keeps scores around 0 (arXiv 2312.09244); 0.01 is
    usual."""
    disable_dropout: bool = True
    chat_template_path: str | None = None
    """Path of a chat template file (.jinja), which replaces the tokenizer's template."""
    eos_token: str | None = None
    """The end token to set in the tokenizer; None keeps its own. It ends texts that no chat template ends."""
    dataset_num_proc: int | None = None
    """Number of processes with which TRL prepares the rows; it changes nothing here."""
    remove_unused_columns: bool = True
    """TRL's; only the columns that are trained on are read, whatever it is."""

    unsupported = FIXED
    renamed = RENAMED | {"max_seq_length": "max_length"}
    RANGES: ClassVar[dict[str, Rule]] = {
        "max_length": COUNT, "center_rewards_coefficient": ZERO_OR_MORE, "chat_template_path": TEMPLATE,
    }
