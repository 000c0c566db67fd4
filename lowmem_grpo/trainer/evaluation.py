"""The evaluation that all trainers share, on one dataset or on several datasets by name."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.data.stream import Stream, rows_of
from lowmem_grpo.losses.loss_metrics import FIRST_WORDS
from lowmem_grpo.runs.state import speed

LONGEST = 100_000  # the most rows of a stream to evaluate on
OF_ALL = frozenset(name.removeprefix("_") for name in ("num_tokens", *speed("", 1.0, 1, 1)))  # in every evaluation
OF_LOSS = ("loss", "policy_loss", "kl", "entropy", *FIRST_WORDS, "sampling",
           "mean_token_accuracy")  # the learner's metrics that evaluations have, as in TRL


def indexed_rows(dataset: Any, parameter: str) -> Any:
    """Return indexable evaluation rows. A stream is read to its end; DataError if it has more than LONGEST rows."""
    rows = rows_of(dataset, parameter)
    if not isinstance(rows, Stream):
        return rows
    read = rows.peek(LONGEST + 1)
    if len(read) > LONGEST:
        raise DataError(f"{parameter} is a stream of more than {LONGEST:,} rows; pass list(stream.take(200))")
    return rows_of(read, parameter)


def evaluation_sets(dataset: Any, args: TrainSettings, read: Callable[[Any, str], Any]) -> Any:
    """Return the rows that `read` makes of one dataset, or a dict of such rows by name for several datasets. Raise
    ValueError if the settings ask for evaluations and `dataset` is None."""
    if dataset is None and (args.eval_strategy != "no" or args.eval_on_start):
        asked = f'eval_strategy is "{args.eval_strategy}"' if args.eval_strategy != "no" else "eval_on_start is True"
        raise ValueError(f"{asked}, which needs an eval_dataset; pass one")
    if isinstance(dataset, Mapping):
        if not dataset:
            raise DataError("eval_dataset is an empty dict; pass rows, or a dict of datasets by name")
        return {str(name): read(part, f"eval_dataset[{name!r}]") for name, part in dataset.items()}
    return None if dataset is None else read(dataset, "eval_dataset")


def evaluate_sets(trainer: Any, dataset: Any, prefix: str) -> dict[str, float]:
    """Return the metrics of `dataset`: rows, a dict of datasets by name, the name of one of the trainer's evaluation
    datasets, or None for all of these. ValueError for None if the trainer has no evaluation dataset."""
    if isinstance(dataset, str) and isinstance(trainer.eval_sets, dict) and dataset in trainer.eval_sets:
        return evaluate_rows(trainer, trainer.eval_sets[dataset], prefix)
    rows = trainer.eval_sets if dataset is None else evaluation_sets(dataset, trainer.args, trainer.evaluation_rows)
    if rows is None:
        raise ValueError("there is no eval_dataset; pass one to the trainer, or to evaluate(eval_dataset=...)")
    sets = {f"{prefix}_{name}": part for name, part in rows.items()} if isinstance(rows, dict) else {prefix: rows}
    return {name: value for key, part in sets.items() for name, value in evaluate_rows(trainer, part, key).items()}


def evaluate_rows(trainer: Any, rows: Any, prefix: str) -> dict[str, float]:
    """Evaluate one dataset, log its metrics and its speed, and return them."""
    began, state = time.monotonic(), trainer.state
    measured = trainer.measure_evaluation(rows) | {"num_tokens": state.num_tokens}
    seconds, steps = time.monotonic() - began, math.ceil(len(rows) / trainer.args.per_device_eval_batch_size)
    metrics = {"step": state.global_step, "epoch": state.epoch,
               **{f"{prefix}_{name}": value for name, value in measured.items()},
               **speed(prefix, seconds, len(rows), steps)}
    trainer.log(metrics)
    trainer.notify("on_evaluate", metrics=metrics)
    return metrics


def check_best_metric(
    wanted: str | None, sets: Any, names: Collection[str], may_measure: Callable[[str], bool]
) -> None:
    """Raise ValueError if metric_for_best_model names a metric that no evaluation of these sets can have. `names` are
    the metrics that every evaluation has."""
    several = isinstance(sets, dict)
    prefixes = [f"eval_{name}_" for name in sets] if several else ["eval_"]
    if wanted is None or any(wanted.startswith(prefix) and may_measure(wanted.removeprefix(prefix))
                             for prefix in prefixes):
        return
    listed = ", ".join(f"{prefixes[0]}{name}" for name in sorted(names))
    others = f", and the same of {', '.join(list(sets)[1:])}" if several and len(prefixes) > 1 else ""
    raise ValueError(f"metric_for_best_model: no evaluation has a metric {wanted!r}; it has {listed}{others}. What a "
                     "reward function logs counts where it names log_metric or log_extra as a parameter")
