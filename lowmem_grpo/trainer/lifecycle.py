"""The start of a run, fresh or from a checkpoint, its evaluations, and its end: finished, interrupted or failed.

Evaluations are the same for all trainers: of one dataset, or of several by name.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from lowmem_grpo.data.prompts import DataError, PromptSource
from lowmem_grpo.data.stream import Stream, rows_of
from lowmem_grpo.losses.loss_metrics import FIRST_WORDS
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.runs.checkpoint import save_adapter
from lowmem_grpo.runs.records import FINAL, RunRecords
from lowmem_grpo.runs.saved_adapter import list_checkpoints
from lowmem_grpo.runs.state import Interrupt, TrainerControl, error_text, speed, summary
from lowmem_grpo.runs.views.report import write_report
from lowmem_grpo.trainer.distributed import describe_machine
from lowmem_grpo.trainer.trl_api import TrlApi

logger = logging.getLogger(__name__)
TRAINED = (". The adapter is as earlier training left it: to begin with a fresh one, load the model and put LoRA on it "
           "again")
LONGEST = 100_000  # the most rows of a stream to evaluate on
OF_ALL = ("num_tokens", *speed("", 1.0, 1, 1))
OF_LOSS = ("loss", "policy_loss", "kl", "entropy", *FIRST_WORDS, "sampling",
           "mean_token_accuracy")  # the learner's metrics that evaluations have, as in TRL


class Lifecycle(TrlApi):
    """The part of a trainer that starts a run in its folder, evaluates, and ends it with a summary and a report.

    An evaluation has transformers' names: `eval_loss`, or `eval_NAME_loss` for several datasets.
    """

    policy: Policy
    source: PromptSource
    records: RunRecords
    control: TrainerControl
    interrupt: Interrupt
    told: dict[str, Any]  # the caller's entries for the summary, written however the run ends
    method: str | None = None  # the kind of training, in the summary
    began = ""  # the start time of this trainer's run, as its summary has it
    stops = False  # True if all ranks have agreed to stop
    began_here = False  # True once the current `train` call has begun or resumed the run
    losses: list[float]  # one for each step of the current `train` call
    samples_seen: int  # in these steps
    summary: dict[str, Any]  # the last line of the log
    eval_sets: Any = None  # as `evaluation_rows` returns it; a dict by name for several datasets

    def save_state(self) -> Path:
        """Write a checkpoint; the loop defines how."""
        raise NotImplementedError

    def weights_changed(self) -> None:
        """Called after an optimizer step or a checkpoint has changed the adapter's weights: trainers that sample tell
        their engine."""

    def start_run(self, resume: bool | str | None) -> None:
        """Set up a fresh run directory, or restore a checkpoint; then write the first summary."""
        torch.manual_seed(self.args.seed)
        self.control.should_training_stop = False  # an earlier `train` may have been stopped
        known, goes_on = self.ranks.first("how the run begins", self.known_run)
        if not resume and goes_on:
            logger.warning("train() was called again: it goes on with the run in %s, which stopped before its end (for "
                           "a new run, make a new trainer)", self.run_dir)
            resume = True
        resumed = bool(resume) and self.resumed(resume or False)
        if not resumed and self.began:
            self.saver.begin_again()
            logger.warning("a new run begins, with the weights as the run before has left them")
        if not resume:
            self.make_room()
        elif not resumed:
            logger.warning("%s has no checkpoint yet: starting from step 0", self.run_dir)
            self.records.rewind(0)
        if resumed or self.began:
            self.weights_changed()
        self.began = str(known.get("began") if resume and known.get("began") else datetime.now().astimezone())
        self.began_here = True
        self.records.summary(self.describe("running") | {"began": self.began, "error": None})

    def resumed(self, wanted: bool | str) -> bool:
        """Load a checkpoint that the first process finds, in all ranks; returns False if there is none."""
        folder = self.ranks.first("the checkpoint", lambda: self.saver.resume(wanted))
        if folder is not None and not self.records.writes:
            self.saver.load(folder)
        return folder is not None

    def known_run(self) -> tuple[dict[str, Any], bool]:
        """Return the folder's summary, and whether it is this trainer's own run, stopped early and resumable."""
        known = self.records.known()
        mine = bool(self.began) and known.get("began") == self.began
        stopped = self.state.global_step < self.state.max_steps and bool(list_checkpoints(self.run_dir))
        return known, mine and stopped

    def make_room(self) -> None:
        """Move an earlier run out of the folder, and log its new place."""
        if earlier := self.records.start_run():
            logger.warning("%s held a run already. It is now %s, with everything that belongs to it, and a new run "
                           "begins%s", self.run_dir, earlier, TRAINED if self.policy.is_trained() else "")

    def should_stop(self) -> bool:
        """Return whether the run ends before the next step; the same in all ranks."""
        here = self.interrupt.requested or self.control.should_training_stop
        return self.stops if self.ranks.count > 1 else here

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

    def summarize(self, seconds: float) -> None:
        """Log the summary of a run that took `seconds`, as the last line of the history."""
        parameters = self.policy.base.num_parameters(exclude_embeddings=True)
        self.summary = summary(self.state, self.losses, self.samples_seen, seconds, parameters)
        self.log(self.summary)

    def end(self, status: str) -> None:
        """Save the last checkpoint, and write the adapter and the summary; upload them if push_to_hub is set."""
        if self.args.save_strategy != "no" or status == "interrupted":
            folder = self.save_state()
            if status == "interrupted":
                logger.warning("stopped at step %d; go on with train(resume_from_checkpoint=True) from %s",
                               self.state.global_step, folder)
        self.ranks.meet("the last checkpoint")  # it is written; another rank may read it
        if self.args.load_best_model_at_end and self.saver.load_best():
            self.weights_changed()
        if self.records.writes:
            save_adapter(self.run_dir / FINAL, self.model.save_lora)
            self.finish(self.describe(status))
            if self.args.push_to_hub and not self.interrupt.requested:
                self.upload()
        self.ranks.meet("the end of the run")

    def finish(self, summary: dict[str, Any]) -> None:
        """Update summary.json and rewrite the report, in the first process. A failed report is only logged."""
        if not self.records.writes:
            return
        self.records.summary(summary)
        try:
            write_report(self.run_dir)
        except (OSError, ValueError) as error:
            logger.warning("the report was not written: %s", error)

    def describe(self, status: str) -> dict[str, Any]:
        """Return the description of the run for summary.json, in plain values."""
        method = {} if self.method is None else {"method": self.method}
        return {"status": status, "model": self.model.loaded.name, "seed": self.args.seed,
                "steps": self.state.global_step, "train_seconds": self.state.elapsed,
                "skipped_rows": dict(self.source.skipped), "best_checkpoint": self.state.best_model_checkpoint,
                "machine": describe_machine(self.model, self.policy.device), "config": self.args.to_dict(), **self.told,
                **method}

    @contextmanager
    def failure_recorded(self) -> Iterator[None]:
        """Write an error inside to the run's summary and report, and raise it."""
        self.began_here = False
        try:
            yield
        except BaseException as error:
            if self.began_here and self.records.writes:
                try:
                    self.finish(self.describe("failed") | {"error": error_text(error)})
                except Exception as second:  # noqa: BLE001 - the first error is the one to raise
                    logger.warning("the failure could not be recorded: %s", second)
            raise
