"""`RewardTrainer`: a reward model, which is LoRA and a score head on the base model, trained on pairs.

    loss = mean over the step's pairs of -log sigmoid(chosen - rejected - margin) + c (chosen + rejected)^2

`chosen` and `rejected` are the scores of whole texts, read at their last token; c is `center_rewards_coefficient`. No
token's log-probability is computed, so there are no logits.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from lowmem_grpo.config.from_trl import check_model, either, settings_of, taken_in
from lowmem_grpo.config.preferences import RewardConfig
from lowmem_grpo.data.pairs import pair_groups, read_scored
from lowmem_grpo.losses.objective import Objective, PolicyOutputs, Reducer, StepTotals
from lowmem_grpo.losses.preference_losses import ranking_losses
from lowmem_grpo.models.policy import Head
from lowmem_grpo.models.score_head import add_score, score_of_hidden, without_score
from lowmem_grpo.models.stored_model import find
from lowmem_grpo.runs.views.live import RewardView
from lowmem_grpo.trainer.offline import OfflineTrainer, limit_of
from lowmem_grpo.trainer.parts import bring_model
from lowmem_grpo.trainer.preference_objectives import Sides
from lowmem_grpo.trainer.sft import set_chat
from lowmem_grpo.types import LossOutput, MicroBatch, Rollout, RolloutGroup
from lowmem_grpo.utils import is_gguf

MARGIN = "margin"  # a field of a rollout: the row's margin, or 0


class ScoreObjective(Objective):
    """The loss of pairs of scores, averaged over the pairs of the step."""

    def __init__(self, head: Head, center: float | None) -> None:
        self.head, self.center = head, center
        self.places: dict[int, int] = {}  # by the id of the rollout: 2 * pair, or 2 * pair + 1 if rejected

    def prepared(self, rollouts: list[Rollout], groups: Sequence[RolloutGroup] = ()) -> None:
        self.places = {id(rollout): place for place, rollout in enumerate(rollouts)}

    def loss(self, batch: MicroBatch, outputs: PolicyOutputs, totals: StepTotals) -> LossOutput:
        scores = score_of_hidden(self.head, outputs.hidden)
        sides = Sides.of([self.places[id(rollout)] for rollout in batch.rollouts], scores.device)
        chosen, rejected = scores[sides.chosen], scores[sides.rejected]
        margins = torch.tensor([rollout.fields[MARGIN] for rollout in batch.rollouts], device=scores.device)
        losses = ranking_losses(chosen, rejected, margins[sides.chosen], self.center)
        measured = {"accuracy": (chosen > rejected).float(), "margin": (chosen - rejected).detach()}
        return LossOutput(losses.sum() / totals.units, {name: each.mean() for name, each in measured.items()},
                          dict.fromkeys(measured, float(len(chosen))), {"scores": scores.detach()})

    def measured(self, reducer: Reducer) -> dict[str, float]:
        scores: Tensor = reducer.sampled("scores")
        found = {f"{name}_reward": getattr(scores, name)().item() for name in ("min", "mean", "max") if len(scores)}
        return super().measured(reducer) | found


class RewardTrainer(OfflineTrainer):
    """Training of a reward model with TRL's constructor. Rows have `chosen` and `rejected`, each a text or messages,
    with `prompt` before them or inside both, and may have a `margin`. The adapter is saved as that of a classifier:
    `AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1)` and `PeftModel.from_pretrained` score with
    it, and `rewards.from_adapter(FOLDER)` rewards GRPO's completions."""

    args: RewardConfig
    method = "reward"
    view_class = RewardView
    of_loss = ("loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward")

    def __init__(
        self, model: Any = None, args: Any = None, data_collator: Any = None, train_dataset: Any = None,
        eval_dataset: Any = None, processing_class: Any = None, compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[Any] | None = None, optimizers: Any = (None, None), optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None, quantization_config: Any = None,
        peft_config: Any = None, tokenizer: Any = None, **others: Any,
    ) -> None:
        """The parameters are TRL's, in its order; `tokenizer` is an older name of `processing_class`. The model may be
        a causal model, whose score head is new, or a classifier with one label. `others` are fields of RewardConfig;
        any other name is refused."""
        others |= {"data_collator": data_collator, "compute_metrics": compute_metrics,
                   "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
                   "preprocess_logits_for_metrics": preprocess_logits_for_metrics}
        config = taken_in(others, settings_of(args, RewardConfig), type(self))
        check_model(model, type(self))
        model, quantization_config = with_classifier(model, config, quantization_config)
        model, peft_config, start = without_score(model, peft_config)
        try:
            trained = bring_model(model, config, either(processing_class, tokenizer), peft_config, quantization_config,
                                  config.max_length or 0)
        except Exception:
            if start is not None and isinstance(model, PeftModel):  # the next trainer goes on from this head
                add_score(model, config.seed, start)
            raise
        set_chat(trained.tokenizer, config)
        head = trained.policy.head = add_score(trained.model, config.seed, start)
        if isinstance(model, str):
            drop_head(trained.policy.base)
        limit = limit_of(config.max_length, RewardConfig.max_length, trained.context)
        self.reading = config, trained.tokenizer, limit, trained.policy.eos_token_ids(trained.tokenizer)
        try:
            super().__init__(trained, config, ScoreObjective(head, config.center_rewards_coefficient), train_dataset,
                             eval_dataset, limit, callbacks, optimizers)
        except Exception:
            if start is None:  # the model is as before
                without_score(trained.model, None)
            raise

    def read(self, dataset: Any, parameter: str = "train_dataset") -> tuple[Any, Any]:
        return read_scored(dataset, parameter, *self.reading)

    def groups_of(self, items: Iterable[Any], policy_version: int = 0) -> list[RolloutGroup]:
        """Return each pair as a group of two whole texts, which end with a token that no model reads."""
        pairs = [*items]
        groups = pair_groups(pairs, policy_version)
        for pair, group in zip(pairs, groups, strict=True):
            for rollout in group.rollouts:
                rollout.fields = {MARGIN: pair.margin or 0.0}
        return groups


def with_classifier(model: Any, config: RewardConfig, quantization_config: Any) -> tuple[Any, Any]:
    """Return the model and the quantization to load it with. A stored classifier that is named is loaded."""
    if not isinstance(model, str) or is_gguf(model):
        return model, quantization_config
    options = dict(config.model_init_kwargs or {})
    where = {name: options[name] for name in ("revision", "token") if name in options}
    path = find(model, **where)
    kinds = AutoConfig.from_pretrained(path, trust_remote_code=False, **where).architectures or []
    if not any("SequenceClassification" in kind for kind in kinds):
        return model, quantization_config
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    if options.pop("trust_remote_code", False):
        raise ValueError("model_init_kwargs: trust_remote_code=True is not supported; only model classes of "
                         "transformers itself can be trained")
    usual = {"dtype": torch.float32, "num_labels": 1}
    return AutoModelForSequenceClassification.from_pretrained(path, trust_remote_code=False, **usual | options), None


def drop_head(base: Any) -> None:
    """Let the head of a model that we loaded share the embedding's matrix: nothing reads it, and its memory is free."""
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if head.weight.shape == getattr(embedding, "weight", head.weight[:0]).shape:
        head.weight = embedding.weight
