"""The training loop that all trainers share: steps, records, checkpoints and callbacks."""

import logging
import math
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from lowmem_grpo.config.launcher import beside_others
from lowmem_grpo.data.prompts import PromptEncoder
from lowmem_grpo.memory.peaks import peak_memory
from lowmem_grpo.models.routes import say_unrouted
from lowmem_grpo.rollout.assessment import OF_ALL, check_best_metric, evaluate_sets, evaluation_sets, indexed_rows
from lowmem_grpo.rollout.replay import ReplayBuffer
from lowmem_grpo.runs.listeners import Callbacks, make_sinks
from lowmem_grpo.runs.state import Interrupt, TrainerControl, TrainOutput, mean_of
from lowmem_grpo.runs.views.live import LiveView
from lowmem_grpo.trainer.lifecycle import FirstSteps, Journal, fixed_facts, run_facts, running, signals_after_steps
from lowmem_grpo.trainer.parts import TrainerParts
from lowmem_grpo.trainer.preflight.checks import before_training, check_ranks_agree, preflight
from lowmem_grpo.trainer.saver import Saver
from lowmem_grpo.trainer.step_accumulator import members
from lowmem_grpo.types import Finding, RolloutGroup

logger = logging.getLogger(__name__)


class Trainer:
    """The loop of all trainers. Each step gets groups, trains on them, and records a line of metrics. `TrlApi` adds the
    names of TRL's and transformers' trainers."""

    view_class: type[LiveView] = LiveView
    method: str | None = None  # the kind of training, in the summary
    event_details: Mapping[str, Any] = {}  # further arguments of callbacks
    does_sampling = False  # True if groups are sampled, False if the rows hold the answers
    engine: Any  # in trainers that sample
    overlap: Any = None  # an OverlappedTraining, in trainers that train while sampling

    def __init__(
        self, parts: TrainerParts, callbacks: list[Any] | None = None, eval_dataset: Any = None,
        rewards: Mapping[str, float] | None = None, replay: ReplayBuffer | None = None,
    ) -> None:
        """`rewards` maps the name of each reward to its weight, for trainers with rewards."""
        self.parts: TrainerParts = parts
        self.args, self.source, self.learner, self.memory = parts.args, parts.source, parts.learner, parts.memory
        self.model, self.tokenizer, self.policy, self.state = parts.model, parts.tokenizer, parts.policy, parts.state
        self.ranks, self.records, self.run_dir = parts.ranks, parts.records, parts.records.run_dir
        self.rewards = dict(rewards or {})
        self.control, self.interrupt = TrainerControl(), Interrupt()
        self.told: dict[str, Any] = {}  # the caller's entries for the summary, written however the run ends
        self.began, self.began_at = "", time.time()  # start of the run, as in the summary; start of this `train` call
        self.losses: list[float] = []  # one for each step of the current `train` call
        self.samples_seen = 0  # rollouts trained on in the current `train` call
        self.summary: dict[str, Any] = {}  # the last line of the log
        self.signalled = False  # True if all ranks have agreed to stop because of a signal
        self.step_before = 0  # the step after which the update in progress began
        self.said_unrouted = False  # True: the warning that the sampler records no routes was logged
        # as `evaluation_rows` returns them; a dict by name for several datasets
        self.eval_sets: Any = evaluation_sets(eval_dataset, self.args, self.evaluation_rows)
        leads = self.ranks.leads
        self.view = None if self.args.disable_tqdm or not leads else self.view_class()
        views, say = ([self.view], self.view.say) if self.view else ([], None)
        own = [FirstSteps(self.records, say, self.rewards), *make_sinks(list(self.args.report_to))] if leads else []
        if not isinstance(callbacks, Iterable | None):
            raise TypeError(f"callbacks is a {type(callbacks).__name__}; it must be a list of callbacks")
        self.callbacks = Callbacks([*views, *own, *(callbacks or [])])
        self.journal = Journal(self.state, self.records, self.args, parts.alarms if leads else None, leads)
        self.saver = Saver(parts, replay, list(self.rewards), self.method)
        self.facts = partial(run_facts, parts.args, parts.state, self.told,
                             fixed_facts(self.method, getattr(self, "given_rows", None)))
        self.model.loaded.runs.append((self.facts, parts.state))
        check_best_metric(self.args.best_metric, self.eval_sets, self.evaluation_names(), self.may_measure)
        self.args.name_best()
        self.notify("on_init_end")

    # Methods that each trainer defines.

    def next_groups(self) -> list[RolloutGroup]:
        """Return the groups of the next update."""
        raise NotImplementedError

    def split_steps(self, groups: list[RolloutGroup]) -> list[list[RolloutGroup]]:
        """Split the groups of an update into one list for each optimizer step."""
        return [groups]

    def measured(self, before: int, groups: list[RolloutGroup], timing: dict[str, float]) -> dict[str, Any]:
        """Return the metrics of the optimizer steps after step `before`, on `groups`: times and memory use."""
        if not self.does_sampling:
            return timing
        updates, plan, planned = self.state.global_step - before, self.parts.planned_time, dict[str, float]()
        if plan is not None and updates:
            trained = 1 if self.learner.critic is None else 2  # adapters, each with its passes
            planned = plan.metrics(self.sampled or groups, groups, updates, self.args.passes * trained,
                                   self.parts.objective.needed_before(updates))
        return {**timing, **planned, "memory/kv_bytes": self.engine.kv_bytes, **self.memory.metrics(),
                "policy_version": self.state.policy_version}

    @property
    def sampled(self) -> list[RolloutGroup]:
        return []

    def weights_changed(self) -> None:
        """In trainers that sample, tell the engine that a step or a checkpoint has changed the adapter's weights."""
        if self.does_sampling:
            self.engine.on_policy_update(self.state.policy_version)

    def evaluation_rows(self, dataset: Any, parameter: str = "eval_dataset") -> Any:
        """Return the rows of one evaluation dataset, as `measure_evaluation` takes them."""
        return indexed_rows(dataset, parameter, images=getattr(self.source, "encoder", PromptEncoder).images)

    def measure_evaluation(self, rows: Any) -> dict[str, float]:
        """Return the metrics of one evaluation dataset."""
        raise NotImplementedError

    def evaluation_names(self) -> set[str]:
        """Return the names of the metrics that every evaluation has."""
        return set(OF_ALL)

    def may_measure(self, name: str) -> bool:
        """Return whether an evaluation may have a metric of this name."""
        return name in self.evaluation_names()

    def upload(self) -> None:
        """Upload the adapter of a finished run, for `push_to_hub`."""
        raise NotImplementedError

    # The verbs; each can be called on its own.

    def update(self, groups: list[RolloutGroup], at_most: int | None = None) -> dict[str, float]:
        """Train on `groups`, and return metrics. `at_most` limits the number of optimizer steps; the first continues a
        gradient `begun` while sampling."""
        overlap = self.overlap
        with self.parts.clock.phase("train"), overlap.gradient(groups) if overlap else nullcontext() as begun:
            if self.does_sampling and self.policy.routed_layers and not self.said_unrouted:
                self.said_unrouted = say_unrouted(members(groups))
            parts = self.split_steps(groups)
            order = (parts * self.args.passes)[:at_most]
            rest = groups if begun is None else [group for group in groups if not begun.holds(group)]
            self.learner.prepare(rest, len(order), self.state.policy_version)
            # dapo and similar losses count the tokens of the whole generation, bnpo those of the optimizer step
            tokens = self.learner.num_tokens(groups) / len(parts) if self.parts.objective.counts_generation else None
            steps: list[dict[str, float]] = []
            for part in order:
                steps.append(self.learner.forward_backward(part, tokens, begun) | self.optim_step())
            undone = 1 - len(order) / (len(parts) * self.args.passes or 1)
            self.state.epoch = self.source.reached - undone * self.source.last
            metrics = mean_of(steps) | self.learner.guard.over(steps)
        return metrics | overlap.metrics(begun, groups) if overlap else metrics

    def forward_backward(self, groups: list[RolloutGroup]) -> dict[str, float]:
        """Add the gradient of one optimizer step's loss over these groups, and return loss metrics."""
        self.learner.prepare(groups, 1, self.state.policy_version)
        return self.learner.forward_backward(groups)

    def optim_step(self) -> dict[str, float]:
        """Apply the gradients and, if due, move the KL reference. Return the gradient norm and the learning rate."""
        metrics = self.learner.optim_step(self.notify)
        self.state.global_step += 1
        self.state.policy_version += 1
        self.learner.whole = True
        self.weights_changed()
        if share := self.args.reference_share(self.state.global_step):
            self.policy.move_reference(share)
        self.parts.objective.stepped(self.state.global_step)
        return metrics

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the metrics of `eval_dataset` (None: the dataset of the constructor). Their names begin with the
        prefix, as in transformers: `eval_loss`, or `eval_NAME_loss` for several datasets."""
        return evaluate_sets(self, eval_dataset, metric_key_prefix)

    def save_state(self) -> Path:
        """Write a checkpoint of everything that a later `train(resume_from_checkpoint=...)` needs."""
        folder = self.saver.save()
        self.notify("on_save")
        return folder

    def preflight(self) -> list[Finding]:
        """Return the problems that would stop or spoil a run, errors first. Nothing is sampled or written."""
        return preflight(self)

    def check_before(self) -> None:
        """Raise ValueError if the ranks differ, or PreflightError if preflight finds an error."""
        self.check_unchanged()
        check_ranks_agree(self)
        self.ranks.first("preflight", partial(before_training, self))

    def check_unchanged(self) -> None:
        """Raise ValueError if a setting that takes effect only at construction was changed afterwards."""
        now, then = self.args.to_dict(), self.saver.settings
        if changed := [name for name in self.args.READ_ONCE if now[name] != then[name]]:
            told = "; ".join(f"args.{name} is {now[name]!r}, and was {then[name]!r}" for name in changed)
            raise ValueError(f"{told} when this trainer was made, which read it then; make a new trainer")

    # The visible loop.

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train up to `max_steps` steps. PreflightError if preflight finds an error.

        `resume_from_checkpoint` is a checkpoint's folder, or True for the newest good checkpoint of `output_dir`. By
        default a new run begins, and an earlier run in `output_dir` moves to `output_dir/earlier`; but a run of this
        trainer that stopped early continues. On SIGTERM or SIGHUP the run saves, and then the process ends by that
        signal. RunInUseError if another process trains into `output_dir`. All ranks must call `train`; RankError if
        another rank fails.
        """
        with beside_others(), self.ranks.together():
            self.check_before()
            with running(self, resume_from_checkpoint), signals_after_steps(self):
                if self.args.eval_on_start:
                    self.records.metrics(self.evaluate())
                self.agree()
                while not self.finished and not self.interrupted:
                    self.train_epoch()
                    if self.control.should_training_stop:
                        break
        self.interrupt.pass_on()
        return TrainOutput(self.state.global_step, self.summary, self.finished)

    @property
    def finished(self) -> bool:
        """True if all steps are made, or all epochs, of which listeners may have ended some early."""
        over = self.source.whole is not None and self.source.round >= self.state.num_train_epochs
        return over or self.state.global_step >= self.state.max_steps

    @property
    def interrupted(self) -> bool:
        """True if a signal ends the run before the next step; the same in all ranks."""
        return self.signalled if self.ranks.count > 1 else self.interrupt.requested

    def train_epoch(self) -> None:
        """Train to the end of the epoch or of the run, or until a listener or a signal ends it."""
        self.notify("on_epoch_begin")
        began, over = self.source.round, False
        while not over:
            self.start_step()
            self.check_unchanged()
            self.train_step(self.next_groups())
            asked = self.control.should_epoch_stop or self.control.should_training_stop
            over = asked or self.finished or self.interrupted or self.source.round > began
        if self.control.should_epoch_stop and self.source.round == began:
            self.source.end_epoch()
            self.saver.mark()
        self.state.num_train_epochs = self.args.epochs_of(self.source.count_rows())  # with the rows skipped so far
        self.notify("on_epoch_end")
        if not self.interrupted:
            self.answer()

    def start_step(self) -> None:
        """Begin a step, before its groups are sampled, and record the state to restore if the step fails."""
        self.parts.clock.restart()
        self.ranks.seed(self.args.seed, self.state.global_step)
        self.saver.mark()
        self.step_before = self.state.global_step
        self.notify("on_step_begin")

    def train_step(self, groups: list[RolloutGroup]) -> None:
        """Train on the groups of the step in progress, write its records, and do what is due."""
        before = self.state.global_step
        metrics = self.update(groups, self.state.max_steps - before)
        self.saver.mark()
        self.record(before, metrics, groups)
        try:
            self.notify("on_step_end", groups=self.sampled)
        except BaseException:
            if self.control.should_log:  # the step is made, so its line is not lost
                self.records.metrics(self.journal.flush() or {})
            raise
        self.answer()

    def answer(self) -> None:
        """Log, evaluate and save, where the settings or a listener ask for it; a listener may still ask meanwhile."""
        self.agree()
        if self.control.should_log:
            self.log_line(self.journal.flush())
            self.agree()
        if self.control.should_evaluate:
            metrics = self.evaluate()
            self.records.metrics(metrics)
            self.saver.note_evaluated(metrics)
            self.agree()
        if self.control.should_save:
            self.save_state()
            self.agree()

    def agree(self) -> None:
        """Tell all ranks which signals each rank has received, and what its callbacks have asked for."""
        asked = self.ranks.gather("what is asked for", (self.interrupt.got, self.control))
        signals = [got for got, _ in asked if got is not None]
        if signals:
            self.interrupt.got = signals[0]
        for name in vars(self.control):
            setattr(self.control, name, any(getattr(control, name) for _, control in asked))
        self.signalled = bool(signals)

    def notify(self, event: str, **details: Any) -> None:
        """Call the callbacks' method `event` with the arguments that transformers' Trainer passes."""
        self.control.follow(event, self.args, self.state, self.step_before)
        self.callbacks(event, self.args, self.state, self.control, model=self.model, processing_class=self.tokenizer,
                       optimizer=self.learner.optimizer, lr_scheduler=self.learner.scheduler, **self.event_details,
                       **details)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add a line to the history, and call the callbacks. A subclass may override this to add values."""
        line = {"step": self.state.global_step, "epoch": self.state.epoch, **logs}
        self.state.log_history.append(line)
        self.notify("on_log", logs=line)

    def record(self, before: int, metrics: dict[str, float], groups: list[RolloutGroup]) -> None:
        """Write the completions of a step, and keep its metrics for the next log line."""
        timing, memory = self.parts.clock.metrics(), peak_memory(self.policy.device)
        seconds = {f"{phase}_s": self.parts.clock.seconds[phase] for phase in ("generate", "train")}
        self.state.elapsed += timing["step_time"]
        self.losses += [metrics.get("loss", math.nan)] * (self.state.global_step - before)
        self.samples_seen += sum(len(group.rollouts) for group in groups) * self.args.passes
        line = {"step": self.state.global_step, "epoch": self.state.epoch, "elapsed": self.state.elapsed, **metrics,
                **self.measured(before, groups, timing), **memory, **self.parts.peaks.metrics(),
                **self.ranks.metrics(timing["step_time"], seconds | memory)}
        self.journal.write(line, groups if self.does_sampling else [])

    def log_line(self, line: dict[str, Any] | None) -> None:
        if line is None:
            return
        try:
            self.log(line, self.began_at)
        finally:  # after `log`, where a subclass may add values; and also if a listener fails
            self.records.metrics(line)
