"""The start and the end of a run, and the journal of its steps."""

import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import datetime
from functools import partial
from typing import Any

import torch

from lowmem_grpo.losses.advantages import UNGROUPED
from lowmem_grpo.rewards.checking.diagnosis import about_rewards
from lowmem_grpo.runs.alarms import Alarms
from lowmem_grpo.runs.checkpoint import save_adapter
from lowmem_grpo.runs.lock import owned
from lowmem_grpo.runs.records import FINAL, RunRecords, images_of, prompt_text
from lowmem_grpo.runs.saved_adapter import list_checkpoints
from lowmem_grpo.runs.state import TrainerState, error_text, mean_of, summary
from lowmem_grpo.runs.trajectory import transcript, turn_records
from lowmem_grpo.runs.views.live import StepTimes
from lowmem_grpo.runs.views.report import write_report
from lowmem_grpo.trainer.preflight.resources import describe_machine
from lowmem_grpo.types import Rollout, RolloutGroup, warn
from lowmem_grpo.utils import time_text

logger = logging.getLogger(__name__)
PHASES = {"time/generate": "sampling", "time/reward": "rewards", "time/train": "training"}

# A log line has the last value of these metrics, and the mean of all others since the last line.
LAST = ("step", "epoch", "elapsed", "num_tokens", "policy_version", "data/skipped_rows", "memory/peak_bytes",
        "memory/reserved_bytes", "memory/kv_bytes", "memory/oom_train", "memory/oom_generate", "learning_rate",
        "nonfinite/steps")


class Journal:
    """Records the completions of every step, checks the alarms, and collects metrics until a log line is due."""

    def __init__(
        self, state: TrainerState, records: RunRecords, settings: Any, alarms: Alarms | None = None, prints: bool = True
    ) -> None:
        """`prints` is False in a process that prints nothing."""
        self.state, self.records, self.settings, self.alarms = state, records, settings, alarms
        self.show_samples = prints and getattr(settings, "log_completions", False)
        self.groups: list[RolloutGroup] = []  # those of the last step

    def write(self, line: dict[str, Any], groups: list[RolloutGroup]) -> None:
        """Record a step's metrics `line` and the completions of `groups`."""
        if self.alarms is not None:
            line |= self.alarms.watch(line)
        if groups:
            self.keep_pictures(groups)
            self.records.completions(self.state.global_step, groups)
        self.state.unlogged.append(line)
        self.groups = groups

    def keep_pictures(self, groups: list[RolloutGroup]) -> None:
        """Keep a small copy of each image, which the report shows beside completions."""
        for name in {name for group in groups for name in images_of(group.prompt_ids) if hasattr(name, "picture")}:
            from lowmem_grpo.data.images import thumbnail  # imports PIL

            self.records.picture(name, partial(thumbnail, name.picture))

    def flush(self) -> dict[str, Any] | None:
        """Return one log line for all steps since the last log line, and print completions of the last step; None if
        there were no steps."""
        if not self.state.unlogged:
            return None
        if self.show_samples and self.groups:
            for group, rollout in chosen(self.groups, self.settings.num_completions_to_print,
                                         self.settings.log_unique_prompts):
                self.show_sample(group, rollout)
        last = self.state.unlogged[-1]
        logged = mean_of(self.state.unlogged) | {name: last[name] for name in LAST if name in last}
        self.state.unlogged = []
        return logged

    def show_sample(self, group: RolloutGroup, rollout: Rollout) -> None:
        what, ended = ("episode", f", ended by {rollout.ending}") if rollout.ending else ("completion", "")
        logger.warning("step %d\n%s\n--- %s, reward %s%s\n%s", self.state.global_step,
                       prompt_text(rollout.opening or group.row.get("prompt")), what, rollout.reward, ended,
                       transcript(turn_records(rollout)) if rollout.turns else rollout.text)


def chosen(groups: list[RolloutGroup], count: int | None, unique: bool) -> list[tuple[RolloutGroup, Rollout]]:
    """Return the completions to print. With `unique`, these are the best ones of the first `count` prompts (None: of
    all prompts); else the first `count` completions (None: the best one of the first prompt)."""
    if count is not None and not unique:
        return [(group, rollout) for group in groups for rollout in group.rollouts][:count]
    return [(group, max(group.rollouts, key=lambda rollout: -math.inf if rollout.reward is None else rollout.reward))
            for group in groups[: count or (None if unique else 1)]]


class FirstSteps:
    """A callback that warns about rewards after the first step, and prints the estimated time left after the second."""

    def __init__(
        self, records: RunRecords, say: Callable[[str], None] | None = None, rewards: Mapping[str, float] | None = None
    ) -> None:
        """`rewards` are the weights of a run's rewards by name; `say` prints a line, or is None to print nothing."""
        self.records, self.say, self.rewards = records, say, rewards
        self.step_times = StepTimes()
        self.seen = 0  # updates since `train` was called

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen = 0
        self.step_times.start_at(state.global_step)

    def on_step_end(
        self, args: Any, state: Any, control: Any, groups: list[RolloutGroup] | None = None, **kwargs: Any
    ) -> None:
        self.seen += 1
        self.step_times.mark(state.global_step)
        taught = getattr(args, "teacher", None) is not None or getattr(args, "advantage_estimator", "") in UNGROUPED
        if self.seen == 1 and groups and (self.rewards or taught) and args.preflight:
            warn(logger, f"step {state.global_step}", about_rewards(groups, self.rewards or {}, taught))
        if self.seen == 2:
            left = self.step_times.left(state.max_steps) or 0.0
            self.records.summary({"expected_seconds": state.elapsed + left})
            if left and self.say is not None and args.preflight:
                self.say(self.expectation(args, state, left))

    def expectation(self, args: Any, state: TrainerState, left: float) -> str:
        """Return a line with the time of a step (without the first), the time left, and the next checkpoint."""
        each = self.step_times.per_step or 0.0
        last = (state.unlogged or state.log_history or [{}])[-1]
        shares = ", ".join(f"{name} {last[key]:.0%}" for key, name in PHASES.items() if key in last)
        every = args.save_steps if getattr(args, "save_strategy", "no") == "steps" else None
        line = (f"{time_text(each)} a step{shares and f' ({shares})'}: {time_text(round(left))} to go until step "
                f"{state.max_steps}")
        if every is None:
            return line
        due = min((state.global_step // every + 1) * every, state.max_steps)
        until_due = round(each * (due - state.global_step))
        return f"{line}; the next checkpoint is due at step {due}, in {time_text(until_due)}"


TRAINED = ". The adapter is as earlier training left it: to begin with a fresh one, load the model and add LoRA again"


@contextmanager
def running(trainer: Any, resume: bool | str | None) -> Iterator[None]:
    """Lock the run's folder, and begin or resume the run; on exit, end the run and record how it ended."""
    with owned(trainer.run_dir) if trainer.records.writes else nullcontext():
        start_run(trainer, resume)
        with failure_recorded(trainer):
            started, trainer.began_at, trainer.losses, trainer.samples_seen = time.monotonic(), time.time(), [], 0
            with trainer.saver.saved_before(trainer.save_state, trainer.interrupt):
                trainer.notify("on_train_begin")
                try:
                    yield
                    save_last(trainer)
                    log_summary(trainer, time.monotonic() - started)
                    if trainer.args.load_best_model_at_end and trainer.saver.load_best():
                        trainer.weights_changed()
                finally:
                    trainer.notify("on_train_end")
            end_run(trainer, "finished" if trainer.finished else "interrupted")


def start_run(trainer: Any, resume: bool | str | None) -> None:
    """Set up a fresh run directory, or restore a checkpoint; then write the first summary."""
    torch.manual_seed(trainer.args.seed)
    trainer.control.should_training_stop = False  # an earlier `train` may have been stopped
    known, goes_on = trainer.ranks.first("how the run begins", lambda: known_run(trainer))
    if not resume and goes_on:
        logger.warning("train() was called again: it goes on with the run in %s, which stopped before its end (for a "
                       "new run, make a new trainer)", trainer.run_dir)
        resume = True
    resumed = bool(resume) and load_checkpoint(trainer, resume or False)
    if not resumed and trainer.began:
        trainer.saver.begin_again()
        logger.warning("a new run begins, with the weights as the run before has left them")
    if not resume:
        if earlier := trainer.records.start_run():
            logger.warning("%s held a run already. It is now %s, with everything that belongs to it, and a new run "
                           "begins%s", trainer.run_dir, earlier, TRAINED if trainer.policy.is_trained() else "")
    elif not resumed:
        logger.warning("%s has no checkpoint yet: starting from step 0", trainer.run_dir)
        trainer.records.rewind(0)
    if resumed or trainer.began:
        trainer.weights_changed()
    trainer.began = str(known.get("began") if resume and known.get("began") else datetime.now().astimezone())
    trainer.records.summary(describe_run(trainer, "running") | {"began": trainer.began, "error": None})


def load_checkpoint(trainer: Any, wanted: bool | str) -> bool:
    """Find a checkpoint in the first process and load it in all ranks; return False if there is none."""
    folder = trainer.ranks.first("the checkpoint", lambda: trainer.saver.resume(wanted))
    if folder is not None and not trainer.records.writes:
        trainer.saver.load(folder)
    return folder is not None


def known_run(trainer: Any) -> tuple[dict[str, Any], bool]:
    """Return the summary in the run's folder, and whether this trainer's own run stopped early and can be resumed."""
    known = trainer.records.known()
    mine = bool(trainer.began) and known.get("began") == trainer.began
    return known, mine and not trainer.finished and bool(list_checkpoints(trainer.run_dir))


def log_summary(trainer: Any, seconds: float) -> None:
    """Log the summary of a run that took `seconds`, as the last line of the history."""
    parameters = trainer.policy.base.num_parameters(exclude_embeddings=True)
    trainer.summary = summary(trainer.state, trainer.losses, trainer.samples_seen, seconds, parameters)
    trainer.log(trainer.summary)


def save_last(trainer: Any) -> None:
    """Write the last checkpoint, if it is not yet written and the run was stopped or saves checkpoints."""
    if trainer.saver.saved < trainer.state.global_step and (
            trainer.args.save_strategy != "no" or not trainer.finished):
        trainer.save_state()
    if not trainer.finished:
        step = trainer.state.global_step
        logger.warning("stopped at step %d; go on with train(resume_from_checkpoint=True) from %s", step,
                       trainer.run_dir / f"checkpoint-{step}")
    trainer.ranks.meet("the last checkpoint")  # other ranks may read it once it is written


def end_run(trainer: Any, status: str) -> None:
    """Write the adapter and the summary. Upload the adapter if push_to_hub is set."""
    if trainer.records.writes:
        save_adapter(trainer.run_dir / FINAL, trainer.model.save_lora)
        update_summary(trainer, describe_run(trainer, status))
        if trainer.args.push_to_hub and not trainer.interrupt.requested:
            trainer.upload()
    trainer.ranks.meet("the end of the run")


def update_summary(trainer: Any, entries: dict[str, Any]) -> None:
    """Update summary.json and rewrite the report, in the first process. A failed report is only logged."""
    if not trainer.records.writes:
        return
    trainer.records.summary(entries)
    try:
        write_report(trainer.run_dir)
    except (OSError, ValueError) as error:
        logger.warning("the report was not written: %s", error)


def describe_run(trainer: Any, status: str) -> dict[str, Any]:
    """Return the description of the run for summary.json, in plain values."""
    state, loaded = trainer.state, trainer.model.loaded
    file = {"model_sha256": loaded.sha256} if loaded.sha256 else {}
    return {"status": status, "model": loaded.name, **file, "seed": trainer.args.seed,
            "skipped_rows": dict(trainer.source.skipped), "best_checkpoint": state.best_model_checkpoint,
            "machine": describe_machine(trainer.model, trainer.policy.device),
            **({"max_steps": state.max_steps} if trainer.source.dataset else {}), **trainer.facts()}


def run_facts(args: Any, state: TrainerState, told: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return what summaries and model cards say of a run. The trainer is no argument, as a model keeps this call, and
    would keep the optimizer too."""
    return {"steps": state.global_step, "train_seconds": state.elapsed, "config": args.to_dict(), **told, **more}


def fixed_facts(method: str | None, dataset: Any) -> dict[str, Any]:
    """Return the kind of training, and the hub's datasets from which the rows are, as `datasets` noted them."""
    read = getattr(getattr(dataset, "info", None), "download_checksums", None) or {}
    names = sorted({match[1] for url in read if (match := re.match(r"hf://datasets/([^/@]+/[^/@]+)@", url))})
    return {**({"method": method} if method else {}), **({"datasets": names} if names else {})}


@contextmanager
def failure_recorded(trainer: Any) -> Iterator[None]:
    """Write an error raised in this context to the run's summary and report, and raise it again."""
    try:
        yield
    except BaseException as error:
        try:
            update_summary(trainer, describe_run(trainer, "failed") | {"error": error_text(error)})
        except Exception as second:  # noqa: BLE001 - the first error is the one to raise
            logger.warning("the failure could not be recorded: %s", second)
        raise


@contextmanager
def signals_after_steps(trainer: Any) -> Iterator[None]:
    """Let signals end the run only after a step, and the model's engine sleep if the trainer does not sample."""
    engine = None if trainer.does_sampling else trainer.model.loaded.keeper.kept
    if engine is not None:
        engine.sleep()
    try:
        with trainer.interrupt.watch():
            yield
    finally:
        if engine is not None:
            engine.on_policy_update(trainer.state.policy_version)
