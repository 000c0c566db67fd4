"""Supervised fine-tuning of the adapter, before GRPO: it teaches an answer format that sampling would never find.

The loss of an optimizer step is

    loss = -sum(log p(trained token)) / N             N: trained tokens of the whole step, in all its micro-batches

as in TRL's `nll`; TRL's `dft` multiplies each log p by p, as a constant. data/shapes.py chooses the trained tokens.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_concat, nested_detach, nested_numpify

from lowmem_grpo.config.from_trl import check_model, either, settings_of, taken_in, with_names
from lowmem_grpo.config.sft import SFTConfig
from lowmem_grpo.data.examples import each_of
from lowmem_grpo.data.packing import PackEncoder
from lowmem_grpo.data.prompts import DataError, Prompt, PromptSource
from lowmem_grpo.data.shapes import Shapes, tokenised
from lowmem_grpo.data.stream import source_of
from lowmem_grpo.losses.objective import Objective, PolicyOutputs, StepTotals
from lowmem_grpo.models.policy import evaluating
from lowmem_grpo.rollout.assessment import OF_LOSS, evaluation_sets
from lowmem_grpo.runs.views.live import SFTView
from lowmem_grpo.trainer.optim import make_scheduler
from lowmem_grpo.trainer.parts import bring_model, make_parts
from lowmem_grpo.trainer.run_memory import plan_memory
from lowmem_grpo.trainer.trl_api import TrlApi
from lowmem_grpo.types import LossOutput, MicroBatch, Rollout, RolloutGroup

MEASURED = ("loss", "entropy", "mean_token_accuracy", "learning_rate", "grad_norm", "optimizer/skipped",
            "nonfinite/steps", "micro_batches")  # what the learner measures in a step

UNTRAINED = -100  # transformers' label of a token that does not count


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


def set_chat(tokenizer: Any, settings: SFTConfig) -> None:
    """Set the tokenizer's chat template and end token as TRL does. ValueError for an end token that is unknown."""
    if settings.chat_template_path is not None:
        tokenizer.chat_template = Path(settings.chat_template_path).expanduser().read_text(encoding="utf-8")
    if settings.eos_token is None:
        return
    if settings.eos_token not in tokenizer.get_vocab():
        raise ValueError(f"eos_token is {settings.eos_token!r}, which is no token of the tokenizer; take one of its "
                         f"own, such as {tokenizer.eos_token!r}")
    tokenizer.eos_token = settings.eos_token


def longest_row(settings: SFTConfig, context: int) -> int:
    """Return the limit on prompt and completion together, in tokens; ValueError if the context is shorter."""
    if settings.max_length is not None and settings.max_length > context:
        raise ValueError(f"max_length is {settings.max_length} and the context has {context} tokens; lower it, or load "
                         "with a larger max_seq_length")
    return settings.max_length or context


class SFTTrainer(TrlApi):
    """Fine-tuning with TRL's constructor. `train()` repeats `next_groups()` and `update(groups)`, and saves
    checkpoints. The model can be passed to GRPOTrainer as it is. GRPO's KL reference is then this fine-tuned model
    (kl_reference "start"), or with kl_reference "base" the base model without adapter."""

    args: SFTConfig
    method = "sft"
    view_class = SFTView

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
        self.given_rows, self.given_eval_rows = train_dataset, eval_dataset
        trained = bring_model(model, config, tokenizer, peft_config, quantization_config, config.max_length or 0)
        set_chat(trained.tokenizer, config)
        longest, ends = longest_row(config, trained.context), trained.policy.eos_token_ids(trained.tokenizer)
        self.shown: dict[str, Any] = {}  # tokenised datasets by name
        if preprocess_logits_for_metrics is not None and compute_metrics is None:
            raise ValueError("preprocess_logits_for_metrics is given, and compute_metrics is not; compute_metrics "
                             "reads the preprocessed logits, so pass both or neither")
        self.predictions = Predictions(compute_metrics, preprocess_logits_for_metrics) if compute_metrics else None
        self.shapes = Shapes(config, trained.tokenizer, longest, ends, formatting_func)
        rows, self.encoder = self.shapes.read(train_dataset)
        source = source_of(rows, self.encoder, config.order_seed, config.shuffle_dataset, whole=1,
                           micro_batch=config.per_device_train_batch_size,
                           horizon=max(0, config.max_steps * config.batch_size))
        memory, peaks = plan_memory(trained.model, config, trained.policy, longest, "max_length", trained.ranks)
        self.own_schedule = not optimizers or optimizers[1] is None
        super().__init__(make_parts(trained, config, source, SFTObjective(config.loss_type), memory, peaks, optimizers),
                         callbacks, eval_dataset)

    @property
    def train_dataset(self) -> Any:
        """The tokenised training rows, with `input_ids` and `labels`, as a `datasets.Dataset`."""
        return self.tokenised("train", self.given_rows, lambda: (self.source.dataset, self.source.encoder))

    @property
    def eval_dataset(self) -> Any:
        """The evaluation rows, tokenised as in `train_dataset`; a dict by name for several datasets."""
        dataset = self.given_eval_rows
        several = dataset if isinstance(dataset, Mapping) else {"eval": dataset}
        shown = {name: self.tokenised(f"eval {name}", rows, partial(self.shapes.read, rows, "eval_dataset"))
                 for name, rows in several.items()}
        return shown if several is dataset else shown["eval"]

    def tokenised(self, name: str, rows: Any, read: Callable[[], tuple[Any, Any]]) -> Any:
        """Return the rows as a tokenised dataset, made once for each name; None for no rows."""
        if name not in self.shown and rows is not None:
            self.shown[name] = tokenised(rows, *read())
        return self.shown.get(name)

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
        self.shown.clear()
        self.count_again()

    def count_again(self) -> None:
        """Count the steps of epochs again, since other rows may be usable now, and make the schedule for them."""
        before, self.state.max_steps = self.state.max_steps, self.args.total_steps(
            self.source.count_rows(read=self.args.max_steps < 1))
        if before != self.state.max_steps and self.own_schedule:
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"]
            self.learner.scheduler = make_scheduler(self.optimizer, self.args, self.state.max_steps)

    def evaluation_rows(self, dataset: Any, parameter: str = "eval_dataset") -> list[RolloutGroup]:
        """Return every usable row of an evaluation dataset as a group; DataError if there is none."""
        rows, encoder = self.shapes.read(super().evaluation_rows(dataset, parameter), parameter)
        source = PromptSource(rows, encoder, self.args.seed, shuffle=False)
        encoded = [encoder.encode(rows[index]) for index in range(len(rows))]
        for index, reason in enumerate(encoded):
            if isinstance(reason, str):
                source.count_skip(index, f"{reason} (evaluation)")
        groups = as_groups(example for example in encoded if isinstance(example, Prompt))
        if not groups:
            raise DataError(f"no row of the evaluation dataset can be used: {source.skip_summary()}")
        return groups

    def next_groups(self) -> list[RolloutGroup]:
        """Return the rows of the next optimizer step, each as a prompt with one completion."""
        return as_groups(self.source.next_batch(self.args.batch_size), self.state.policy_version)

    def update(self, groups: list[RolloutGroup], at_most: int | None = None) -> dict[str, float]:
        metrics = super().update(groups, at_most)
        completions = sum(len(rollout.completion_ids) for group in groups for rollout in group.rollouts)
        self.state.num_tokens += completions + sum(len(group.prompt_ids) for group in groups)
        beside = [f"{what}/{group['name']}" for group in self.optimizer.param_groups if "name" in group
                  for what in ("learning_rate", "grad_norm")]  # of modules that are trained beside LoRA
        return {name: metrics[name] for name in (*MEASURED, *beside) if name in metrics} | {
            "completions/tokens": completions}

    def step(self) -> dict[str, float]:
        return self.update(self.next_groups())

    def measured(self, before: int, groups: list[RolloutGroup], timing: dict[str, float]) -> dict[str, Any]:
        completions = sum(len(rollout.completion_ids) for group in groups for rollout in group.rollouts)
        return {"step_time": timing["step_time"], "tokens_per_second": completions / timing["step_time"],
                "memory/oom_train": self.memory.train.failures, "num_tokens": self.state.num_tokens,
                "data/skipped_rows": sum(self.source.skipped.values())}

    def measure_evaluation(self, rows: list[RolloutGroup]) -> dict[str, float]:
        """Return loss, entropy and accuracy over these rows' trained tokens, dropout off, and the user's metrics."""
        metrics = self.learner.measure(rows)
        own = {} if self.predictions is None else self.predictions.metrics(self.model, rows)
        return {name: metrics[name] for name in OF_LOSS if name in metrics} | own

    def may_measure(self, name: str) -> bool:
        return self.predictions is not None or super().may_measure(name)

    def evaluation_names(self) -> set[str]:
        return super().evaluation_names() | {"loss", "entropy", "mean_token_accuracy"}


def as_groups(examples: Iterable[Prompt], policy_version: int = 0) -> list[RolloutGroup]:
    """Return each example as a group of one rollout (a prompt with one completion), for packing and the learner."""
    return [
        RolloutGroup(example.row, example.ids, [Rollout(
            example.completion_ids, [0.0] * len(example.completion_ids), "stop", policy_version=policy_version,
            trained=example.trained,
        )])
        for item in examples for example in each_of(item)
    ]


@dataclass(frozen=True)
class Predictions:
    """The user's `compute_metrics` and `preprocess_logits_for_metrics`, as in transformers. They get full logits, (T,
    V) for each row: on the device for one row, on the host for all rows."""

    compute: Callable[[EvalPrediction], Mapping[str, float]]
    preprocess: Callable[[Tensor, Tensor], Any] | None = None

    def metrics(self, model: Any, groups: Iterable[RolloutGroup]) -> dict[str, float]:
        """Return the user's metrics of the model's predictions for N rows, under names without "eval_". Predictions are
        (N, T, ...) and labels (N, T), not shifted, with -100 where nothing is trained."""
        both: Any = None  # predictions and labels
        with evaluating(model):
            for group, rollout in ((each, rollout) for each in groups for rollout in each.rollouts):
                ids, trained = rollout.completion_ids, rollout.trained or [True] * len(rollout.completion_ids)
                labels = [token if counts else UNTRAINED for token, counts in zip(ids, trained, strict=True)]
                row = torch.tensor([[UNTRAINED] * len(group.prompt_ids) + labels], device=model.device)
                tokens = torch.tensor([[*group.prompt_ids, *ids]], device=model.device)
                own = self.predicted(model, tokens, row), row.cpu().numpy()
                both = own if both is None else nested_concat(both, own, UNTRAINED)
        metrics = numbers_of(self.compute(EvalPrediction(*both)))
        return {name.removeprefix("eval_"): value for name, value in metrics.items()}

    @torch.no_grad()
    def predicted(self, model: Any, ids: Tensor, labels: Tensor) -> Any:
        """Return the logits (1, T, V) of a row's ids (1, T), or what `preprocess` returns for them, as numpy arrays."""
        logits = model(input_ids=ids).logits
        outputs = logits if self.preprocess is None else self.preprocess(logits, labels)
        return nested_numpify(nested_detach(outputs))


def numbers_of(metrics: Any) -> dict[str, float]:
    """Return the result of compute_metrics as floats by name; TypeError if it is no dict of numbers."""
    wanted = "compute_metrics is to return a dict of numbers by name, as {'accuracy': 0.5}"
    if not isinstance(metrics, Mapping):
        raise TypeError(f"{wanted}; it returned {metrics!r:.80}")
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError("text is no number")
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{wanted}; {name!r} is {value!r:.80}") from error
    return numbers
