"""Evaluation, the same for all trainers: one dataset or several by name, and the metrics that an evaluation has."""

import math
import time
from collections.abc import Mapping
from typing import Any

from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.data.stream import Stream, rows_of
from lowmem_grpo.losses.loss_metrics import FIRST_WORDS
from lowmem_grpo.runs.state import speed
from lowmem_grpo.trainer.trl_api import TrlApi

LONGEST = 100_000  # the most rows of a stream to evaluate on
OF_ALL = ("num_tokens", *speed("", 1.0, 1, 1))
OF_LOSS = ("loss", "policy_loss", "kl", "entropy", *FIRST_WORDS, "sampling",
           "mean_token_accuracy")  # the learner's metrics that evaluations have, as in TRL


class Evaluator(TrlApi):
    """Evaluation of a trainer under transformers' names: `eval_loss`, or `eval_NAME_loss` for several datasets."""

    eval_sets: Any = None  # as `evaluation_rows` returns it; a dict by name for several datasets

    def evaluation_rows(self, dataset: Any, parameter: str = "eval_dataset") -> Any:
        """Return indexable evaluation rows. A stream is read to its end; DataError if it has more than LONGEST rows."""
        rows = rows_of(dataset, parameter)
        if not isinstance(rows, Stream):
            return rows
        read = rows.peek(LONGEST + 1)
        if len(read) > LONGEST:
            raise DataError(f"{parameter} is a stream of more than {LONGEST:,} rows; pass list(stream.take(200))")
        return rows_of(read, parameter)

    def evaluation_sets(self, dataset: Any) -> Any:
        """Return the evaluation rows, or a dict of them by name; ValueError if settings need them and None is given."""
        if dataset is None and (self.args.eval_strategy != "no" or self.args.eval_on_start):
            strategy = self.args.eval_strategy
            asked = f'eval_strategy is "{strategy}"' if strategy != "no" else "eval_on_start is True"
            raise ValueError(f"{asked}, which needs an eval_dataset; pass one")
        if isinstance(dataset, Mapping):
            if not dataset:
                raise DataError("eval_dataset is an empty dict; pass rows, or a dict of datasets by name")
            return {str(name): self.evaluation_rows(part, f"eval_dataset[{name!r}]") for name, part in dataset.items()}
        return None if dataset is None else self.evaluation_rows(dataset)

    def measure_evaluation(self, rows: Any) -> dict[str, float]:
        """Return the metrics of one dataset, as `evaluation_rows` returned it; each trainer defines this."""
        raise NotImplementedError

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the metrics of `eval_dataset`, by default the trainer's own, with the prefix before their names."""
        rows = self.eval_sets if eval_dataset is None else self.evaluation_sets(eval_dataset)
        if rows is None:
            raise ValueError("there is no eval_dataset; pass one to the trainer, or to evaluate(eval_dataset=...)")
        if not isinstance(rows, dict):
            return self.evaluate_rows(rows, metric_key_prefix)
        parts = [self.evaluate_rows(part, f"{metric_key_prefix}_{name}") for name, part in rows.items()]
        return {name: value for metrics in parts for name, value in metrics.items()}

    def evaluate_rows(self, rows: Any, prefix: str) -> dict[str, float]:
        """Evaluate one dataset, log its metrics and its speed, and return them."""
        began = time.monotonic()
        measured = self.measure_evaluation(rows) | {"num_tokens": self.state.num_tokens}
        seconds, steps = time.monotonic() - began, math.ceil(len(rows) / self.args.per_device_eval_batch_size)
        named = {f"{prefix}_{name}": value for name, value in measured.items()}
        metrics = {"step": self.state.global_step, "epoch": self.state.epoch, **named,
                   **speed(prefix, seconds, len(rows), steps)}
        self.log(metrics)
        self.notify("on_evaluate", metrics=metrics)
        return metrics

    def evaluation_names(self) -> set[str]:
        """Return the names of the metrics that every evaluation has."""
        return {name.removeprefix("_") for name in OF_ALL}

    def may_measure(self, name: str) -> bool:
        """Return whether an evaluation may have a metric of this name."""
        return name in self.evaluation_names()

    def check_best_metric(self) -> None:
        """Raise ValueError if metric_for_best_model names a metric that no evaluation can have."""
        wanted, several = self.args.best_metric, isinstance(self.eval_sets, dict)
        prefixes = [f"eval_{name}_" for name in self.eval_sets] if several else ["eval_"]
        if wanted is None or any(wanted.startswith(prefix) and self.may_measure(wanted.removeprefix(prefix))
                                 for prefix in prefixes):
            return
        listed = ", ".join(f"{prefixes[0]}{name}" for name in sorted(self.evaluation_names()))
        others = f", and the same of {', '.join(list(self.eval_sets)[1:])}" if several and len(prefixes) > 1 else ""
        raise ValueError(f"metric_for_best_model: no evaluation has a metric {wanted!r}; it has {listed}{others}. What "
                         "a reward function logs counts where it names log_metric or log_extra as a parameter")
