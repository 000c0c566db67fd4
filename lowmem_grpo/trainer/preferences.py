"""`DPOTrainer`, `ORPOTrainer` and `KTOTrainer`: training on preferences between completions that the rows hold.

The reference is the model itself: without its adapter, or for a continued adapter with a copy of it from before
training. Losses are means over the rows of the whole optimizer step, where TRL's are means over a device's batch.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from lowmem_grpo.config.from_trl import check_model, either, settings_of, taken_in
from lowmem_grpo.config.preferences import DPOConfig, KTOConfig, ORPOConfig, PreferenceConfig, ReferredConfig
from lowmem_grpo.data.pairs import ClosedPairEncoder, pair_groups, read_labelled, read_pairs
from lowmem_grpo.data.prompts import DataError, Prompt
from lowmem_grpo.data.stream import StreamSource
from lowmem_grpo.models.policy import in_float32
from lowmem_grpo.models.stored_model import resolve
from lowmem_grpo.runs.views.live import PreferenceView
from lowmem_grpo.trainer.offline import OfflineTrainer, Predictions, limit_of
from lowmem_grpo.trainer.parts import TrainedModel, bring_model
from lowmem_grpo.trainer.preference_objectives import (
    NEXT_PROMPT,
    REFERENCE,
    LabelledObjective,
    OddsRatioObjective,
    PairObjective,
    PreferenceObjective,
)
from lowmem_grpo.trainer.step_accumulator import members
from lowmem_grpo.types import RolloutGroup

logger = logging.getLogger(__name__)
MEASURED = ("compute_metrics", "preprocess_logits_for_metrics")
TOGETHER = 256  # rows whose reference is computed at a time
OF_REWARDS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")


class PreferenceTrainer(OfflineTrainer):
    """What the trainers on preferences share."""

    args: PreferenceConfig
    settings: ClassVar[type[PreferenceConfig]]
    view_class = PreferenceView

    def make(
        self, model: Any, args: Any, train_dataset: Any, eval_dataset: Any, tokenizer: Any, loading: tuple[Any, Any],
        ref_model: Any, callbacks: list[Any] | None, optimizers: Any, others: dict[str, Any],
    ) -> None:
        """Make the trainer; `loading` are PEFT's and the quantization's configurations of a model to load."""
        self.predictions = Predictions.of(*(others.pop(name, None) for name in MEASURED))
        config = taken_in(others, settings_of(args, self.settings), type(self))
        check_model(model, type(self))
        trained = bring_model(model, config, tokenizer, *loading, config.max_length or 0)
        self.limit = limit_of(config.max_length, PreferenceConfig.max_length, trained.context)
        self.reading = config, trained.tokenizer, self.limit, trained.policy.eos_token_ids(trained.tokenizer)
        if isinstance(config, ReferredConfig):
            set_reference(trained, ref_model, config.sync_ref_model)
        OfflineTrainer.__init__(self, trained, config, self.objective(config), train_dataset, eval_dataset, self.limit,
                                callbacks, optimizers)

    def objective(self, config: Any) -> PreferenceObjective:
        raise NotImplementedError

    def groups_of(self, items: Iterable[Any], policy_version: int = 0) -> list[RolloutGroup]:
        return pair_groups(items, policy_version)


class ReferredTrainer(PreferenceTrainer):
    """A trainer whose loss compares the policy with a reference."""

    args: ReferredConfig

    def __init__(
        self, model: Any = None, ref_model: Any = None, args: Any = None, data_collator: Any = None,
        train_dataset: Any = None, eval_dataset: Any = None, processing_class: Any = None,
        compute_metrics: Callable[..., Any] | None = None, callbacks: list[Any] | None = None,
        optimizers: Any = (None, None), quantization_config: Any = None, peft_config: Any = None,
        tokenizer: Any = None, **others: Any,
    ) -> None:
        """The parameters are TRL's, in its order; `tokenizer` is an older name of `processing_class`. `ref_model` may
        only be the model's own base. `others` are fields of the settings; any other name is refused."""
        self.reference: dict[int, list[Any]] = {}  # by row: log-probabilities of its completions, on the host
        self.reference_of: Any = None  # the adapter that computed them, and those of the evaluation's rows
        others |= {"data_collator": data_collator, "compute_metrics": compute_metrics}
        if ref_model is model and isinstance(model, torch.nn.Module):
            raise ValueError("ref_model is the model itself, which changes in training, and the reference is the model "
                             "without its adapter, or with the adapter that it has now; leave ref_model out")
        self.make(model, args, train_dataset, eval_dataset, either(processing_class, tokenizer),
                  (peft_config, quantization_config), ref_model, callbacks, optimizers, others)
        if self.args.precompute_ref_log_probs and isinstance(self.source, StreamSource):
            raise DataError("precompute_ref_log_probs=True is not supported with IterableDataset: the rows are a "
                            "stream, which has no end to read to; leave it out, or make a list of the rows")

    def follow_reference(self) -> None:
        """Forget the log-probabilities of another reference: a resumed run has its own again."""
        if self.reference_of is not self.policy.reference_adapter:
            self.reference_of, self.reference = self.policy.reference_adapter, {}
            sets = self.eval_sets.values() if isinstance(self.eval_sets, dict) else [self.eval_sets or []]
            for rollout in members([group for groups in sets for group in groups]):
                rollout.ref_logprobs = None

    def measure_evaluation(self, rows: list[RolloutGroup]) -> dict[str, float]:
        self.follow_reference()
        return super().measure_evaluation(rows)

    def next_groups(self) -> list[RolloutGroup]:
        groups = super().next_groups()
        if self.args.precompute_ref_log_probs:
            self.follow_reference()
            self.reference = self.reference or self.compute_reference()
            for group in groups:
                assert group.row_index is not None
                for rollout, logprobs in zip(group.rollouts, self.reference[group.row_index], strict=True):
                    rollout.ref_logprobs = logprobs
        return groups

    def compute_reference(self) -> dict[int, list[Any]]:
        """Return the reference's log-probabilities of all usable rows, by their index."""
        made: dict[int, list[Any]] = {}
        rows = self.source.dataset
        for start in range(0, len(rows), TOGETHER):
            encoded = [(index, self.encoder.encode(rows[index]))
                       for index in range(start, min(start + TOGETHER, len(rows)))]
            groups = self.groups_of(replace(item, index=index) for index, item in encoded if isinstance(item, Prompt))
            self.learner.fill_fields(groups, REFERENCE)
            self.learner.tell_fields(groups, (REFERENCE,))
            made |= {group.row_index: [rollout.ref_logprobs for rollout in group.rollouts] for group in groups
                     if group.row_index is not None}
        return made


class DPOTrainer(ReferredTrainer):
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290) and its relatives, with TRL's
    constructor. Rows have `chosen` and `rejected`, and `prompt` unless both sides begin with it."""

    args: DPOConfig
    settings = DPOConfig
    method = "dpo"
    of_loss = (*OF_REWARDS, "rewards/accuracies", "entropy", "mean_token_accuracy")

    def objective(self, config: DPOConfig) -> PreferenceObjective:
        return PairObjective(config)

    def read(self, dataset: Any, parameter: str = "train_dataset") -> tuple[Any, Any]:
        return read_pairs(dataset, parameter, *self.reading)


class ORPOTrainer(PreferenceTrainer):
    """Odds-ratio preference optimization (Hong et al. 2024, arXiv 2403.07691) with TRL's constructor: fine-tuning on
    the chosen sides and preferring them, without a reference. Rows are those of DPOTrainer."""

    args: ORPOConfig
    settings = ORPOConfig
    method = "orpo"
    of_loss = (*OF_REWARDS, "rewards/accuracies", "nll_loss", "log_odds_ratio", "log_odds_chosen")

    def __init__(
        self, model: Any = None, args: Any = None, data_collator: Any = None, train_dataset: Any = None,
        eval_dataset: Any = None, processing_class: Any = None, model_init: Any = None,
        callbacks: list[Any] | None = None, optimizers: Any = (None, None),
        preprocess_logits_for_metrics: Callable[..., Any] | None = None, peft_config: Any = None,
        compute_metrics: Callable[..., Any] | None = None, quantization_config: Any = None, tokenizer: Any = None,
        **others: Any,
    ) -> None:
        """The parameters are TRL's, in its order, as in DPOTrainer."""
        others |= {"data_collator": data_collator, "compute_metrics": compute_metrics, "model_init": model_init,
                   "preprocess_logits_for_metrics": preprocess_logits_for_metrics}
        self.make(model, args, train_dataset, eval_dataset, either(processing_class, tokenizer),
                  (peft_config, quantization_config), None, callbacks, optimizers, others)

    def objective(self, config: ORPOConfig) -> PreferenceObjective:
        return OddsRatioObjective(config)

    def read(self, dataset: Any, parameter: str = "train_dataset") -> tuple[Any, Any]:
        return read_pairs(dataset, parameter, *self.reading, kind=ClosedPairEncoder)

    def groups_of(self, items: Iterable[Any], policy_version: int = 0) -> list[RolloutGroup]:
        groups = super().groups_of(items, policy_version)
        for group in groups:
            group.rollouts[0].trains_prompt = True
        return groups


class KTOTrainer(ReferredTrainer):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306) with TRL's constructor. Rows have
    `prompt`, `completion` and `label`, or are pairs, which are read as two rows."""

    args: KTOConfig
    settings = KTOConfig
    method = "kto"
    of_loss = (*OF_REWARDS, "kl", "entropy")

    def objective(self, config: KTOConfig) -> PreferenceObjective:
        return LabelledObjective(config, self.limit)

    def read(self, dataset: Any, parameter: str = "train_dataset") -> tuple[Any, Any]:
        return read_labelled(dataset, parameter, *self.reading)

    def groups_of(self, items: Iterable[Any], policy_version: int = 0) -> list[RolloutGroup]:
        groups = super().groups_of(items, policy_version)
        if len(groups) == 1 and self.args.loss_type == "kto":
            others = [self.another_prompt(groups[0])]
        else:
            others = [group.prompt_ids for group in (*groups[1:], *groups[:1])]
        for group, prompt in zip(groups, others, strict=True):
            group.rollouts[0].fields[NEXT_PROMPT] = prompt
        return groups

    def another_prompt(self, group: RolloutGroup) -> list[int]:
        """Return the first other prompt of the rows, for the only row of a step; its own if none is known, as in TRL.
        DataError if there is only one row."""
        if isinstance(self.source, StreamSource):
            self.encoder.say_once("the KL term reads the only row of a step behind its own prompt, as TRL does: a "
                                  "stream has no other row to ask for. A step of several rows has others")
            return group.prompt_ids
        rows = self.source.dataset
        for index in range(len(rows)):
            item = self.encoder.encode(rows[index])
            if isinstance(item, Prompt) and item.ids != group.prompt_ids:
                return item.ids
        if len(rows) > 1:
            return group.prompt_ids
        raise DataError("the KL term of loss_type 'kto' reads each completion behind the prompt of another row, and "
                        "all rows have the same prompt; add others, or take loss_type='apo_zero_unpaired'")


def set_reference(trained: TrainedModel, ref_model: Any, moves: bool) -> None:
    """Keep the model's adapter as the reference, unless it is untrained, or `ref_model` is the model's own base.
    ValueError for another `ref_model`."""
    if ref_model is None:
        trained.policy.keep_reference(moves)
        return
    if not isinstance(ref_model, str | torch.nn.Module):
        raise TypeError(f"ref_model is a {type(ref_model).__name__}, and it must be a model or None; the second "
                        "parameter is ref_model, as in TRL: write args=..., train_dataset=...")
    if not is_base(getattr(ref_model, "inner", ref_model), trained):
        named = repr(ref_model) if isinstance(ref_model, str) else f"a {type(ref_model).__name__}"
        raise ValueError(f"ref_model is {named}, which by its name or its weights is not the model's base; the "
                         "reference is the model itself, without its adapter or with the adapter that it has now. "
                         "Leave ref_model out, or load the model from what ref_model was loaded from")
    logger.warning("ref_model is the model's own base: the model without its adapter is the reference, and ref_model "
                   "itself is not used; leave it out to save its memory")
    trained.policy.reference_adapter = {weight.name: in_float32(weight.without_effect)
                                        for weight in trained.policy.trained if moves}


def is_base(ref_model: Any, trained: TrainedModel) -> bool:
    """Return whether `ref_model` is the base of the trained model: its name, or a model with its name, its norms, and
    the first row of each matrix that both hold in the same form."""
    if isinstance(ref_model, str):
        base = trained.model.loaded.name
        try:
            return ref_model == base or Path(resolve(ref_model)).resolve() == Path(resolve(base)).resolve()
        except OSError:  # one is the path of no model, or of one that is gone
            return False
    own = {name.replace(".base_layer.", "."): value for name, value in trained.policy.base.named_parameters()}
    names = {getattr(model.config, "_name_or_path", None) for model in (ref_model, trained.policy.base)}
    pairs = [(own[name], value) for name, value in ref_model.named_parameters()
             if name in own and own[name].shape == value.shape and own[name].dtype.is_floating_point]
    same = [torch.equal(*(each.detach()[: 1 if value.ndim > 1 else None].cpu().float() for each in (held, value)))
            for held, value in pairs]
    return len(names) == 1 and bool(same) and all(same)
