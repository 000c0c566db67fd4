"""Supervised fine-tuning of the adapter, before GRPO: it teaches an answer format that sampling would never find.

The loss of an optimizer step is

    loss = -sum(log p(trained token)) / N             N: trained tokens of the whole step, in all its micro-batches

as in TRL's `nll`; TRL's `dft` multiplies each log p by p, as a constant. data/shapes.py chooses the trained tokens.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowmem_grpo.config.from_trl import check_model, either, settings_of, taken_in, with_names
from lowmem_grpo.config.sft import SFTConfig
from lowmem_grpo.data.examples import each_of
from lowmem_grpo.data.packing import PackEncoder
from lowmem_grpo.data.prompts import Prompt
from lowmem_grpo.data.shapes import Shapes
from lowmem_grpo.losses.objective import Objective, PolicyOutputs, StepTotals
from lowmem_grpo.rollout.assessment import evaluation_sets
from lowmem_grpo.runs.views.live import SFTView
from lowmem_grpo.trainer.offline import OfflineTrainer, Predictions, longest_row
from lowmem_grpo.trainer.optim import make_scheduler
from lowmem_grpo.trainer.parts import bring_model
from lowmem_grpo.types import LossOutput, MicroBatch, Rollout, RolloutGroup


class SFTObjective(Objective):
    """The loss of every trained token, averaged over the step."""

    def __init__(self, loss_type: str = "nll") -> None:
        self.loss_type = loss_type

    def loss(self, batch: MicroBatch, outputs: PolicyOutputs, totals: StepTotals) -> LossOutput:
        logprobs = outputs.logprobs
        # -log p, or p (-log p) for "dft", whose weight p has no gradient (Wu et al. 2025, arXiv 2508.05629)
        losses = -logprobs * logprobs.detach().exp() if self.loss_type == "dft" else -logprobs
        loss = losses.sum() / totals.tokens
        return LossOutput(loss, {"entropy": outputs.entropy().detach().mean(),
                                 "mean_token_accuracy": outputs.hits.mean()})


def set_chat(tokenizer: Any, settings: Any) -> None:
    """Set the tokenizer's chat template and end token as TRL does. ValueError for an end token that is unknown."""
    if settings.chat_template_path is not None:
        tokenizer.chat_template = Path(settings.chat_template_path).expanduser().read_text(encoding="utf-8")
    if settings.eos_token is None:
        return
    if settings.eos_token not in tokenizer.get_vocab():
        raise ValueError(f"eos_token is {settings.eos_token!r}, which is no token of the tokenizer; take one of its "
                         f"own, such as {tokenizer.eos_token!r}")
    tokenizer.eos_token = settings.eos_token


class SFTTrainer(OfflineTrainer):
    """Fine-tuning with TRL's constructor. `train()` repeats `next_groups()` and `update(groups)`, and saves
    checkpoints. The model can be passed to GRPOTrainer as it is. GRPO's KL reference is then this fine-tuned model
    (kl_reference "start"), or with kl_reference "base" the base model without adapter."""

    args: SFTConfig
    method = "sft"
    view_class = SFTView
    of_loss = ("loss", "entropy", "mean_token_accuracy")

    def __init__(
        self, model: Any = None, *placed: Any, train_dataset: Any = None, args: Any = None,
        processing_class: Any = None, eval_dataset: Any = None, callbacks: list[Any] | None = None,
        optimizers: Any = (None, None),
        quantization_config: Any = None, peft_config: Any = None, formatting_func: Callable[..., Any] | None = None,
        tokenizer: Any = None, data_collator: Any = None, compute_metrics: Callable[..., Any] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None, **others: Any,
    ) -> None:
        """The parameters are TRL's. Positional arguments are (model, train_dataset, args, processing_class,
        eval_dataset), or in TRL's order if the second is the settings. `tokenizer` is an older name of
        `processing_class`. `others` are fields of SFTConfig; any other name is refused."""
        train_dataset, args, processing_class, eval_dataset, others["data_collator"] = with_names(
            placed, train_dataset=train_dataset, args=args, processing_class=processing_class,
            eval_dataset=eval_dataset, data_collator=data_collator,
        )
        tokenizer = either(processing_class, tokenizer)
        config = taken_in(others, settings_of(args, SFTConfig), SFTTrainer)
        check_model(model, type(self))
        trained = bring_model(model, config, tokenizer, peft_config, quantization_config, config.max_length or 0)
        set_chat(trained.tokenizer, config)
        longest = longest_row(config.max_length, trained.context)
        ends = trained.policy.eos_token_ids(trained.tokenizer)
        self.predictions = Predictions.of(compute_metrics, preprocess_logits_for_metrics)
        self.shapes = Shapes(config, trained.tokenizer, longest, ends, formatting_func)
        self.own_schedule = not optimizers or optimizers[1] is None
        super().__init__(trained, config, SFTObjective(config.loss_type), train_dataset, eval_dataset, longest,
                         callbacks, optimizers)

    def read(self, dataset: Any, parameter: str = "train_dataset") -> tuple[Any, Any]:
        return self.shapes.read(dataset, parameter)

    def train_only(self, wrap: Callable[[Any], Any]) -> None:
        """Replace the encoder of each dataset by `wrap(encoder)`; datasets already read are read again."""
        self.shapes = replace(self.shapes, wrap=wrap)
        encoder: Any = self.source.encoder
        if isinstance(encoder, PackEncoder):
            encoder.inner = wrap(encoder.inner)
        else:
            self.source.encoder = wrap(encoder)
        self.source.unusable.clear()
        self.eval_sets = evaluation_sets(self.given_eval_rows, self.args, self.evaluation_rows)
        self.shown.made.clear()
        self.count_again()

    def count_again(self) -> None:
        """Count the steps of epochs again, since other rows may be usable now, and make the schedule for them."""
        before, self.state.max_steps = self.state.max_steps, self.args.total_steps(
            self.source.count_rows(read=self.args.max_steps < 1))
        if before != self.state.max_steps and self.own_schedule:
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"]
            self.learner.scheduler = make_scheduler(self.optimizer, self.args, self.state.max_steps)

    def groups_of(self, items: Iterable[Prompt], policy_version: int = 0) -> list[RolloutGroup]:
        """Return each row as a prompt with one completion."""
        return as_groups(items, policy_version)


def as_groups(examples: Iterable[Prompt], policy_version: int = 0) -> list[RolloutGroup]:
    """Return each example as a group of one rollout (a prompt with one completion), for packing and the learner."""
    return [
        RolloutGroup(example.row, example.ids, [Rollout(
            example.completion_ids, [0.0] * len(example.completion_ids), "stop", policy_version=policy_version,
            trained=example.trained,
        )])
        for item in examples for example in each_of(item)
    ]
