"""The loop of every trainer: its parts, one step after another, records, checkpoints and listeners. A subclass calls
`learn` (its rows, what it minimises) and then `write`; `next_groups` gives the groups of an update, and `measured` what
it logs."""

import logging
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.data.prompts import PromptSource
from lowmem_grpo.data.stream import Stream
from lowmem_grpo.losses.objective import Objective
from lowmem_grpo.memory.offload.activations import drop_nothing, enable_checkpointing
from lowmem_grpo.memory.oom import MemoryExhaustedError, RunMemory
from lowmem_grpo.memory.peaks import PhasePeaks, peak_memory
from lowmem_grpo.models.policy import Policy, mixed_dtype
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rollout.replay import ReplayBuffer
from lowmem_grpo.runs.alarms import Alarms
from lowmem_grpo.runs.clock import Clock
from lowmem_grpo.runs.findings import Finding
from lowmem_grpo.runs.journal import Journal
from lowmem_grpo.runs.listeners import Callbacks
from lowmem_grpo.runs.lock import owned
from lowmem_grpo.runs.records import NoRecords, RunRecords
from lowmem_grpo.runs.state import Interrupt, TrainerControl, TrainerState, TrainOutput
from lowmem_grpo.runs.views.live import LiveView
from lowmem_grpo.runs.views.sinks import make_sinks
from lowmem_grpo.trainer.distributed import RankError, check_ranks_agree, check_settings, ranks
from lowmem_grpo.trainer.learner import Learner
from lowmem_grpo.trainer.lifecycle import Lifecycle
from lowmem_grpo.trainer.model_setup import Brought, check_vocabulary, tokenizer_of
from lowmem_grpo.trainer.nonfinite import Guard, NonFiniteError
from lowmem_grpo.trainer.optim import own_or_made
from lowmem_grpo.trainer.preflight.checks import before_training, preflight
from lowmem_grpo.trainer.preflight.first_steps import FirstSteps
from lowmem_grpo.trainer.saver import Saver
from lowmem_grpo.types import RolloutGroup

logger = logging.getLogger(__name__)


class Trainer(Lifecycle):
    """Trains the adapter of a model: groups, an update on them, and their line in the records, step after step."""

    view_class: type[LiveView] = LiveView
    scorer: RewardScorer | None = None  # None without rewards
    samples = False  # whether the trainer's groups are sampled, or its rows hold the answers
    takes_prompts = True  # whether a step takes prompts from its rows

    def __init__(
        self, model: Any, args: TrainSettings, processing_class: Any = None, peft_config: Any = None,
        quantization_config: Any = None, optimizers: Any = (None, None), tokens: int = 0,
    ) -> None:
        """`model` is ours, one of transformers or a name; `tokens` are those that prompt and completion need."""
        self.tokenizer = tokenizer_of(processing_class)
        self.args, self.optimizers, self.ranks = args, optimizers, ranks()
        self.losses, self.samples_seen, self.began_at = [], 0, time.time()
        check_settings(args, self.ranks.count, self.takes_prompts)
        if args.log_level != "passive":
            logging.getLogger("lowmem_grpo").setLevel(args.log_level.upper())
        model = str(model) if isinstance(model, Path) else model
        loading = args
        if args.use_cpu and isinstance(model, str):
            loading = replace(args, model_init_kwargs={"device_map": "cpu", **(args.model_init_kwargs or {})})
        model = Brought(model, self.tokenizer, peft_config, quantization_config, loading, tokens).trainable()
        device = model.get_input_embeddings().weight.device
        if args.use_cpu and device.type != "cpu":
            raise ValueError(f'use_cpu is True, and the model lies on {device}; load it with device="cpu"')
        if args.disable_dropout:
            drop_nothing(model)
        self.model, self.tokenizer = model, self.tokenizer or model.loaded.tokenizer
        check_vocabulary(model)
        stops = getattr(getattr(args, "vllm_sampling_params", None), "stop_token_ids", None)
        model.loaded.tokenizer, model.loaded.stop_ids = self.tokenizer, tuple(stops or ())  # both are saved with it
        self.policy = Policy(model, mixed_dtype(model, args.bf16, args.fp16), args.logits_chunk)
        if args.gradient_checkpointing is not None:
            enable_checkpointing(self.policy.base, args.gradient_checkpointing)
        self.run_dir = Path(args.output_dir)
        self.records = RunRecords(self.run_dir) if self.ranks.leads else NoRecords(self.run_dir)
        self.control, self.interrupt = TrainerControl(), Interrupt()
        self.told = {}

    def learn(self, source: PromptSource, objective: Objective, memory: RunMemory, peaks: PhasePeaks) -> None:
        """Make what this trainer learns with; `peaks` count the memory of each phase."""
        self.source, self.objective, self.memory, self.peaks = source, objective, memory, peaks
        rows = None if isinstance(source.dataset, Stream) else len(source.dataset)
        self.state = TrainerState(max_steps=self.args.total_steps(rows))
        if not self.ranks.leads:  # what a rank that saves has of its own is read by all
            self.state.is_world_process_zero, self.state.is_local_process_zero = False, not self.ranks.place.local
        self.clock = Clock(peaks)
        self.learner = self.make_learner()

    def make_learner(self) -> Learner:
        optimizer, scheduler = own_or_made(self.optimizers, self.policy.trainable, self.args, self.state.max_steps)
        fp16 = torch.float16 in (self.policy.autocast_dtype, self.policy.head.weight.dtype)
        offload = self.model.loaded.offload and self.policy.base.is_gradient_checkpointing
        return Learner(self.policy, self.args, self.objective, optimizer, scheduler, offload=offload, fp16=fp16,
                       bound=self.memory.train, guard=Guard(self.args.nonfinite_steps, self.state, self.records),
                       ranks=self.ranks)

    def write(
        self, callbacks: list[Any] | None, alarms: Alarms | None = None, replay: ReplayBuffer | None = None,
    ) -> None:
        """Make what this trainer writes and shows: records, checkpoints, the live view and other listeners."""
        leads = self.ranks.leads
        self.view = None if self.args.disable_tqdm or not leads else self.view_class()
        views, say = ([self.view], self.view.say) if self.view else ([], None)
        own = [FirstSteps(self.records, say, self.scorer), *make_sinks(list(self.args.report_to))] if leads else []
        if not isinstance(callbacks, Iterable | None):
            raise TypeError(f"callbacks is a {type(callbacks).__name__}; it must be a list of callbacks")
        self.callbacks = Callbacks([*views, *own, *(callbacks or [])])
        self.journal = Journal(self.state, self.records, self.args, alarms if leads else None, leads)
        self.saver = Saver(self.records, self.args, self.model, self.learner, self.source, self.state, self.memory,
                           replay, self.scorer.names if self.scorer else [])
        self.check_best_metric()
        self.notify("on_init_end")

    # What a trainer defines.

    def next_groups(self) -> list[RolloutGroup]:
        """The groups of the next update."""
        raise NotImplementedError

    def update(self, groups: list[RolloutGroup], at_most: int | None = None) -> dict[str, float]:
        """Train on these groups: one optimizer step, or several but `at_most` so many; returns their metrics."""
        with self.clock.phase("train"):
            return self.forward_backward(groups) | self.optim_step()

    def measured(self, before: int, groups: list[RolloutGroup], timing: dict[str, float]) -> dict[str, Any]:
        """Return what to log of the steps after step `before`, made on `groups`, beside what every trainer logs."""
        return timing

    def weights_changed(self) -> None:
        """The adapter's weights are others than before."""

    @property
    def sampled(self) -> list[RolloutGroup]:
        return []

    # The verbs; each can be used by itself.

    def forward_backward(self, groups: list[RolloutGroup]) -> dict[str, float]:
        """Add the gradient of one optimizer step's loss over these groups; returns loss metrics."""
        self.learner.prepare(groups, 1, self.state.policy_version)
        return self.learner.forward_backward(groups)

    def optim_step(self) -> dict[str, float]:
        """Apply the gradients; returns their norm and the learning rate."""
        self.notify("on_pre_optimizer_step")
        metrics = self.learner.optim_step()
        self.state.global_step += 1
        self.state.policy_version += 1
        self.weights_changed()
        self.notify("on_optimizer_step")
        return metrics

    def save_state(self) -> Path:
        """Write a checkpoint of everything that a later `train(resume_from_checkpoint=...)` needs."""
        folder = self.saver.save()
        self.notify("on_save")
        return folder

    def preflight(self) -> list[Finding]:
        """Return what would stop or spoil a run, errors first. Nothing is sampled, called or written."""
        return preflight(self)

    def check_before(self) -> None:
        """See that all processes of the run agree, and then what preflight finds; PreflightError for an error."""
        check_ranks_agree(self)
        self.ranks.first("preflight", partial(before_training, self))

    # The visible loop.

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train up to `max_steps`, with records, checkpoints and listeners; PreflightError if preflight finds an error.

        `resume_from_checkpoint` is True for the newest good checkpoint of `output_dir`, or a checkpoint's folder.
        Without it a new run begins, and one that is in `output_dir` moves to `output_dir/earlier`. But a trainer whose
        own run stopped before its end goes on with it. A run stopped by SIGTERM or SIGHUP saves, and then the process
        ends by that signal. RunInUseError where another process is training into `output_dir`. Of several ranks each
        calls this; RankError where another one has failed.
        """
        with self.ranks.together():
            self.check_before()
            with self.running(resume_from_checkpoint), self.training():
                if self.args.eval_on_start:
                    self.records.metrics(self.evaluate())
                self.agree()
                while not self.finished and not self.should_stop():
                    self.train_step()
        self.interrupt.pass_on()
        return TrainOutput(self.state.global_step, self.summary, self.finished)

    @contextmanager
    def running(self, resume: bool | str | None) -> Iterator[None]:
        """Inside, this process owns the run's folder, and the run has begun or is resumed; afterwards it has ended."""
        with owned(self.run_dir) if self.records.writes else nullcontext(), self.failure_recorded():
            self.start_run(resume)
            started, self.began_at, self.losses, self.samples_seen = time.monotonic(), time.time(), [], 0
            self.notify("on_train_begin")
            self.notify("on_epoch_begin")
            try:
                try:
                    yield
                finally:
                    self.notify("on_epoch_end")
                self.summarize(time.monotonic() - started)
            finally:
                self.notify("on_train_end")
            self.end("finished" if self.finished else "interrupted")

    @property
    def finished(self) -> bool:
        return self.state.global_step >= self.state.max_steps

    @contextmanager
    def training(self) -> Iterator[None]:
        """Inside, signals end the run after its step, and an engine that this trainer does not use has no cache."""
        engine = None if self.samples else self.model.loaded.keeper.kept
        if engine is not None:
            engine.sleep()
        try:
            with self.interrupt.watch():
                yield
        finally:
            if engine is not None:
                engine.on_policy_update(self.state.policy_version)

    def train_step(self) -> None:
        """One update, its records, and an evaluation and a save where they are due."""
        self.clock.restart()
        self.ranks.seed(self.args.seed, self.state.global_step)
        self.saver.mark()
        self.notify("on_step_begin")
        before, epoch = self.state.global_step, int(self.state.epoch)
        with self.saved_before(Exception):
            groups = self.next_groups()
        with self.saved_before(MemoryExhaustedError, NonFiniteError, RankError):
            metrics = self.update(groups, self.state.max_steps - before)
        self.record(before, metrics, groups)
        self.saver.mark()
        self.notify("on_step_end", groups=self.sampled)
        self.agree()
        self.follow(epoch)
        asked = self.control.taken()
        if asked.should_log:
            self.log_line(self.journal.flush())
        if self.due(before, epoch, self.args.eval_steps, self.args.eval_strategy) or asked.should_evaluate:
            with self.saved_before(MemoryExhaustedError):
                metrics = self.evaluate()
                self.records.metrics(metrics)
                self.saver.note_evaluated(metrics)
        if self.due(before, epoch, self.args.save_steps, self.args.save_strategy) or asked.should_save:
            self.save_state()

    def follow(self, epoch: int) -> None:
        """Tell the listeners where the rows began anew in this step; a listener may end the epoch, too."""
        if self.control.should_epoch_stop:
            self.control.should_epoch_stop = False
            self.source.end_epoch()
            self.state.epoch = self.source.epoch
        if int(self.state.epoch) > epoch and self.state.global_step < self.state.max_steps:
            self.notify("on_epoch_end")
            self.notify("on_epoch_begin")

    def due(self, before: int, epoch: int, every: int | None, strategy: str) -> bool:
        """Return whether an epoch or the run ends in the steps just made, or a multiple of `every` lies in them."""
        if strategy == "epoch":
            return int(self.state.epoch) > epoch or self.finished
        return strategy == "steps" and every is not None and self.state.global_step // every > before // every

    @contextmanager
    def saved_before(self, *kinds: type[Exception]) -> Iterator[None]:
        """Save the state before this step if such an error ends the run, so that the run can be resumed."""
        try:
            yield
        except kinds as error:
            if self.state.global_step and self.records.writes:
                self.saver.go_back()
                folder = self.save_state()
                error.add_note(f"Saved {folder}; mend the cause, then go on with train(resume_from_checkpoint=True)")
            raise

    def notify(self, event: str, **details: Any) -> None:
        """Tell the listeners, with what transformers' Trainer tells them."""
        self.callbacks(event, self.args, self.state, self.control, model=self.model, processing_class=self.tokenizer,
                       optimizer=self.learner.optimizer, lr_scheduler=self.learner.scheduler, **details)

    def record(self, before: int, metrics: dict[str, float], groups: list[RolloutGroup]) -> None:
        """Write one step's metrics and completions, and tell the listeners."""
        timing, memory = self.clock.metrics(), peak_memory(self.policy.device)
        seconds = {f"{phase}_s": self.clock.seconds[phase] for phase in ("generate", "train")}
        self.state.elapsed += timing["step_time"]
        self.losses += [metrics.get("loss", math.nan)] * (self.state.global_step - before)
        self.samples_seen += sum(len(group.rollouts) for group in groups) * getattr(self.args, "num_iterations", 1)
        line = {"step": self.state.global_step, "epoch": self.state.epoch, "elapsed": self.state.elapsed, **metrics,
                **self.measured(before, groups, timing), **memory, **self.peaks.metrics(),
                **self.ranks.metrics(timing["step_time"], seconds | memory)}
        self.log_line(self.journal.write(before, line, groups if self.samples else []))

    def log_line(self, line: dict[str, Any] | None) -> None:
        """Log and record a line of the steps since the last one, where there is one."""
        if line is None:
            return
        try:
            self.log(line, self.began_at)
        finally:  # with what a subclass has added, and also where a listener fails
            self.records.metrics(line)

