"""`OfflineTrainer`: what trainers share whose rows have their completions, from the rows to the records of a step."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_concat, nested_detach, nested_numpify

from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.data.prompts import DataError, Prompt, PromptSource
from lowmem_grpo.data.shapes import tokenised
from lowmem_grpo.data.stream import source_of
from lowmem_grpo.losses.objective import Objective
from lowmem_grpo.models.policy import evaluating
from lowmem_grpo.trainer.parts import TrainedModel, make_parts
from lowmem_grpo.trainer.run_memory import plan_memory
from lowmem_grpo.trainer.trl_api import TrlApi
from lowmem_grpo.types import RolloutGroup

logger = logging.getLogger(__name__)
UNTRAINED = -100  # transformers' label of a token that does not count
OF_STEP = ("learning_rate", "grad_norm", "optimizer/skipped", "nonfinite/steps", "micro_batches")


class OfflineTrainer(TrlApi):
    """A trainer on given completions. Subclasses say how rows are `read`, and how they become groups (`groups_of`)."""

    of_loss: tuple[str, ...] = ("loss",)  # the objective's metrics that are logged, in training and in evaluations
    predictions: "Predictions | None" = None

    def __init__(
        self, trained: TrainedModel, config: TrainSettings, objective: Objective, dataset: Any, eval_dataset: Any,
        longest: int, callbacks: list[Any] | None = None, optimizers: Any = (None, None),
    ) -> None:
        """`longest` is the limit on the tokens of a sequence. The datasets are the user's."""
        self.given_rows, self.given_eval_rows, self.shown = dataset, eval_dataset, ShownRows(tokenised)
        rows, self.encoder = self.read(dataset)
        source = source_of(rows, self.encoder, config.order_seed, config.shuffle_dataset, whole=1,
                           micro_batch=config.per_device_train_batch_size,
                           horizon=max(0, config.max_steps * config.batch_size))
        memory, peaks = plan_memory(trained.model, config, trained.policy, longest, "max_length", trained.ranks)
        super().__init__(make_parts(trained, config, source, objective, memory, peaks, optimizers), callbacks,
                         eval_dataset)

    def read(self, dataset: Any, parameter: str = "train_dataset") -> tuple[Any, Any]:
        """Return (rows, their encoder); DataError if the columns fit no layout."""
        raise NotImplementedError

    def groups_of(self, items: Iterable[Any], policy_version: int = 0) -> list[RolloutGroup]:
        """Return the encoder's results as groups."""
        raise NotImplementedError

    @property
    def train_dataset(self) -> Any:
        """The training rows, tokenised as in TRL, as a `datasets.Dataset`."""
        return self.shown.of("train", self.given_rows, lambda: (self.source.dataset, self.source.encoder))

    @property
    def eval_dataset(self) -> Any:
        """The evaluation rows, tokenised as in `train_dataset`; a dict by name for several datasets."""
        return self.shown.of_each(self.given_eval_rows, lambda rows: self.read(rows, "eval_dataset"))

    def evaluation_rows(self, dataset: Any, parameter: str = "eval_dataset") -> list[RolloutGroup]:
        """Return every usable row of an evaluation dataset as groups; DataError if there is none."""
        rows, encoder = self.read(super().evaluation_rows(dataset, parameter), parameter)
        source = PromptSource(rows, encoder, self.args.seed, shuffle=False)
        encoded = [encoder.encode(rows[index]) for index in range(len(rows))]
        for index, reason in enumerate(encoded):
            if isinstance(reason, str):
                source.count_skip(index, f"{reason} (evaluation)")
        groups = self.groups_of(example for example in encoded if isinstance(example, Prompt))
        if not groups:
            raise DataError(f"no row of the evaluation dataset can be used: {source.skip_summary()}")
        return groups

    def next_groups(self) -> list[RolloutGroup]:
        """Return the rows of the next optimizer step as groups."""
        return self.groups_of(self.source.next_batch(self.args.batch_size), self.state.policy_version)

    def update(self, groups: list[RolloutGroup], at_most: int | None = None) -> dict[str, float]:
        metrics = super().update(groups, at_most)
        completions = completion_tokens(groups)
        self.state.num_tokens += completions + sum(len(group.prompt_ids) for group in groups)
        beside = [f"{what}/{group['name']}" for group in self.optimizer.param_groups if "name" in group
                  for what in ("learning_rate", "grad_norm")]  # of modules that are trained beside LoRA
        return {name: metrics[name] for name in (*self.of_loss, *OF_STEP, *beside) if name in metrics} | {
            "completions/tokens": completions}

    def get_total_train_batch_size(self, *_: Any) -> int:
        return self.args.batch_size

    def step(self) -> dict[str, float]:
        return self.update(self.next_groups())

    def measured(self, before: int, groups: list[RolloutGroup], timing: dict[str, float]) -> dict[str, Any]:
        return {"step_time": timing["step_time"],
                "tokens_per_second": completion_tokens(groups) / timing["step_time"],
                "memory/oom_train": self.memory.train.failures, "num_tokens": self.state.num_tokens,
                "data/skipped_rows": sum(self.source.skipped.values())}

    def measure_evaluation(self, rows: list[RolloutGroup]) -> dict[str, float]:
        """Return the loss and its metrics over these rows, dropout off, and the user's metrics."""
        own = {} if self.predictions is None else self.predictions.metrics(self.model, rows)
        metrics = self.learner.measure(rows)
        return {name: metrics[name] for name in self.of_loss if name in metrics} | own

    def may_measure(self, name: str) -> bool:
        return self.predictions is not None or super().may_measure(name)

    def evaluation_names(self) -> set[str]:
        return super().evaluation_names() | {*self.of_loss}


def completion_tokens(groups: list[RolloutGroup]) -> int:
    return sum(len(rollout.completion_ids) for group in groups for rollout in group.rollouts)


def longest_row(max_length: int | None, context: int) -> int:
    """Return the limit on prompt and completion together, in tokens; ValueError if the context is shorter."""
    if max_length is not None and max_length > context:
        raise ValueError(f"max_length is {max_length} and the context has {context} tokens; lower it, or load "
                         "with a larger max_seq_length")
    return max_length or context


def limit_of(max_length: int | None, usual: int | None, context: int) -> int:
    """Return `longest_row`. A default `usual` above the context is lowered to it."""
    if max_length == usual and usual is not None and context < usual:
        logger.warning("max_length is %d, its default, and the context has %d tokens, which is the limit", usual,
                       context)
        return context
    return longest_row(max_length, context)


class ShownRows:
    """The tokenised datasets of a trainer, each made once."""

    def __init__(self, make: Callable[[Any, Any, Any], Any]) -> None:
        """`make` returns the tokenised form of (dataset, rows, encoder)."""
        self.make, self.made = make, dict[str, Any]()

    def of(self, name: str, dataset: Any, read: Callable[[], tuple[Any, Any]]) -> Any:
        """Return the tokenised dataset; None for None."""
        if name not in self.made and dataset is not None:
            self.made[name] = self.make(dataset, *read())
        return self.made.get(name)

    def of_each(self, given: Any, read: Callable[[Any], tuple[Any, Any]]) -> Any:
        """Return the tokenised evaluation dataset, or a dict of them by name for several."""
        several = given if isinstance(given, Mapping) else {"eval": given}
        shown = {name: self.of(f"eval {name}", rows, lambda rows=rows: read(rows))  # type: ignore[misc]
                 for name, rows in several.items()}
        return shown if several is given else shown["eval"]


@dataclass(frozen=True)
class Predictions:
    """The user's `compute_metrics` and `preprocess_logits_for_metrics`, as in transformers. They get full logits, (T,
    V) for each row: on the device for one row, on the host for all rows."""

    compute: Callable[[EvalPrediction], Mapping[str, float]]
    preprocess: Callable[[Tensor, Tensor], Any] | None = None

    @classmethod
    def of(cls, compute: Any, preprocess: Any) -> Self | None:
        """Return both functions, or None if there are none; ValueError for `preprocess` alone."""
        if preprocess is not None and compute is None:
            raise ValueError("preprocess_logits_for_metrics is given, and compute_metrics is not; compute_metrics "
                             "reads the preprocessed logits, so pass both or neither")
        return cls(compute, preprocess) if compute else None

    def metrics(self, model: Any, groups: Iterable[RolloutGroup]) -> dict[str, float]:
        """Return the user's metrics of the model's predictions for N rows (of a pair: its chosen and its rejected
        side), under names without "eval_". Predictions are (N, T, ...) and labels (N, T), not shifted, with -100 where
        nothing is trained."""
        both: Any = None  # predictions and labels
        with evaluating(model):
            for group, rollout in ((each, rollout) for each in groups for rollout in each.rollouts):
                ids, trained = rollout.completion_ids, rollout.trained or [True] * len(rollout.completion_ids)
                labels = [token if counts else UNTRAINED for token, counts in zip(ids, trained, strict=True)]
                prompt = rollout.splits[0].prompt_ids or [] if rollout.splits else group.prompt_ids  # a side's own
                row = torch.tensor([[UNTRAINED] * len(prompt) + labels], device=model.device)
                tokens = torch.tensor([[*prompt, *ids]], device=model.device)
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
