"""The checkpoints of a run: writing them, finding the best, and resuming from one."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.rollout.replay import ReplayBuffer
from lowmem_grpo.runs import checkpoint
from lowmem_grpo.runs.records import LostLinesError, RecordError
from lowmem_grpo.runs.saved_adapter import CheckpointError, MismatchError
from lowmem_grpo.runs.state import OF_SETTINGS, Interrupt
from lowmem_grpo.trainer.parts import TrainerParts
from lowmem_grpo.trainer.step_accumulator import RandomStates

logger = logging.getLogger(__name__)
SAVED = "Saved"  # the first word of the note on an error
OF_OPTIMIZER = ("learning_rate", "embedding_learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


class Saver:
    """Writes the checkpoints of a run, and restores the run from a checkpoint."""

    def __init__(
        self, parts: TrainerParts, replay: ReplayBuffer | None = None, reward_names: Sequence[str] = (),
        method: str | None = None,
    ) -> None:
        """`replay` and `reward_names` are given only for runs that sample; `method` is the kind of training."""
        self.method = method or "grpo"
        self.records, self.run_dir = parts.records, parts.records.run_dir
        self.config, self.model = parts.args, parts.model
        self.learner, self.source, self.state, self.memory = parts.learner, parts.source, parts.state, parts.memory
        self.settings = self.config.to_dict()  # the run's settings; a single step may change some
        self.replay, self.reward_names = ReplayBuffer(0) if replay is None else replay, reward_names
        self.random, self.saved = RandomStates(parts.policy.device), -1  # the step of the last checkpoint
        self.mark()
        states = self.learner.optimizer.state_dict(), self.learner.scheduler.state_dict()
        moves = {"teacher": True, "reference": getattr(self.config, "sync_ref_model", False)}
        kept = {name: adapter for name, adapter in parts.policy.kept_adapters.items() if moves[name]}
        self.first = deepcopy((self.snapshot(), *states, kept, self.learner.beside()[1]))

    def save(self) -> Path:
        """Write a checkpoint, in one rank only. Delete the oldest ones above `save_total_limit`, except the best."""
        self.records.flush()
        folder = self.run_dir / f"checkpoint-{self.state.global_step}"
        self.note_best(folder)
        self.saved = self.state.global_step
        if not self.records.writes:
            return folder
        folder = checkpoint.save_checkpoint(self.run_dir, self.state.global_step, self.model, self.learner.optimizer,
                                            self.learner.scheduler, self.snapshot(), self.learner.beside()[1])
        best = {Path(self.state.best_model_checkpoint)} if self.state.best_model_checkpoint else set()
        try:
            checkpoint.prune(self.run_dir, self.config.save_total_limit, best)
        except OSError as error:  # the new checkpoint is complete
            logger.warning("old checkpoints could not be deleted: %s", error)
        return folder

    def mark(self) -> None:
        """Record the state before a step: prompts drawn, groups in the replay buffer, tokens seen and random states."""
        self.random.capture()
        self.marked = self.source.state(), self.replay.entries, self.state.num_tokens, self.state.epoch
        self.measured = self.learner.objective.state()

    def go_back(self) -> None:
        """Restore the state of the last `mark`, after a step that failed."""
        self.random.restore()
        drawn, self.replay.entries, self.state.num_tokens, self.state.epoch = self.marked
        self.source.restore(drawn)
        self.learner.objective.restore(self.measured)

    def note_evaluated(self, metrics: dict[str, Any]) -> None:
        """Record the step if its evaluation is the best so far; ValueError if `metrics` lack metric_for_best_model."""
        name, state = self.config.best_metric, self.state
        if name is None:
            return
        if metrics.get(name) is None:
            listed = ", ".join(sorted(key for key in metrics if key.startswith("eval_")))
            raise ValueError(f"metric_for_best_model: an evaluation has no metric {name!r}; it has {listed}")
        if self.config.is_better(metrics[name], state.best_metric):
            state.best_metric, state.best_global_step = metrics[name], state.global_step

    def load_best(self) -> bool:
        """Load the weights of the best checkpoint into the adapter. Return False if there is no such checkpoint."""
        best = self.state.best_model_checkpoint
        if best is None:
            logger.warning("load_best_model_at_end: no checkpoint was evaluated, so the adapter stays as it is")
            return False
        checkpoint.load_weights(Path(best), self.model)
        logger.info("loaded the best checkpoint, %s", best)
        return True

    def note_best(self, folder: Path) -> None:
        """Record this checkpoint if its evaluation, or its mean reward since the last save, is the best so far."""
        if self.config.best_metric is not None:
            if self.state.best_global_step == self.state.global_step:
                self.state.best_model_checkpoint = str(folder)
            return
        after = self.saved if self.config.save_strategy == "epoch" else self.state.global_step - self.config.save_steps
        lines = [line for line in self.state.log_history if line["step"] > after and "train_runtime" not in line]
        recent = [line["reward"] for line in lines if line.get("reward") is not None]
        if recent and (self.state.best_metric is None or sum(recent) / len(recent) > self.state.best_metric):
            self.state.best_metric = sum(recent) / len(recent)
            self.state.best_model_checkpoint = str(folder)

    def begin_again(self) -> None:
        """Reset everything except the weights to the state at construction."""
        first, optimizer, scheduler, kept, beside = deepcopy(self.first)
        for name, adapter in kept.items():
            setattr(self.learner.policy, f"{name}_adapter", adapter)
        self.learner.optimizer.load_state_dict(optimizer)
        self.learner.scheduler.load_state_dict(scheduler)
        self.learner.restore_beside(first["beside"], beside.__getitem__, weights=False)
        self.restore(first)
        self.state.log_history, self.saved = [], -1

    def resume(self, wanted: bool | str) -> Path | None:
        """Restore the checkpoint in the folder `wanted`; if `wanted` is True, the newest good one (broken ones are
        logged). Return its folder, or None if there is no checkpoint yet; raise CheckpointError if all are broken."""
        checkpoint.clean_leftovers(self.run_dir)
        broken: list[str] = []
        folder = Path(str(wanted)).expanduser()
        folder = folder if folder.exists() else Path(self.config.home, folder)  # the working directory may have changed
        newest = checkpoint.list_checkpoints(self.run_dir)[::-1] if wanted is True else [folder]
        for folder in newest:
            try:
                self.load(folder)
            except CheckpointError as error:
                if wanted is not True or isinstance(error, MismatchError):
                    raise
                logger.warning("passed over: %s", error)
                broken.append(str(error))
            else:
                logger.info("resumed from %s", folder)
                return folder
        if broken:
            raise CheckpointError(f"no checkpoint of {self.run_dir} can be used: {'; '.join(broken)}. Without "
                                  "resume_from_checkpoint a new run begins, and this one moves to a folder of its own")
        return None

    def load(self, folder: Path) -> None:
        """Restore a checkpoint, and warn of record files that lack lines from before the checkpoint."""
        saved = checkpoint.load_checkpoint(folder, self.model, self.learner.optimizer, self.learner.scheduler,
                                           self.method)
        with checkpoint.trusted(folder, DataError, RecordError):
            self.restore(saved)
            self.restore_reference(folder, saved)
            self.learner.restore_beside(saved.get("beside"), partial(checkpoint.tensors_of, folder))
            self.state.log_history = self.records.rewind(int(saved["trainer"]["global_step"]))
        self.saved = self.state.global_step
        for missing in self.records.missing(saved.get("records", {})):
            logger.warning("%s; the others are lost, and the run goes on without them", missing)

    @contextmanager
    def saved_before(self, save: Callable[[], Path], interrupt: Interrupt) -> Iterator[None]:
        """Save the state from before this step if an error occurs in this context. Nothing is saved if writing raised
        the error (lost lines are none of writing), after a second Ctrl-C, or in the middle of the optimizer's step."""
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            unsaved = CheckpointError, RecordError, *([KeyboardInterrupt] if interrupt.requested else [])
            told = any(note.startswith(SAVED) for note in getattr(error, "__notes__", ()))  # by an inner block
            if (self.state.global_step and self.records.writes and self.learner.whole and not told
                    and (isinstance(error, LostLinesError) or not isinstance(error, unsaved))):
                try:
                    self.go_back()
                    note = f"{SAVED} {save()}; mend the cause, then go on with train(resume_from_checkpoint=True)"
                except Exception as second:  # noqa: BLE001 - the first error is the one to raise
                    note = f"Saving the state before this step failed too: {second}"
                error.add_note(note)
            raise

    def snapshot(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self.state).items() if name != "log_history"}
        return {"trainer": state, "source": self.source.state(), "scaler": self.learner.scaler.state_dict(),
                "method": self.method, "config": self.settings, "memory": self.memory.state(),
                "objective": self.learner.objective.state(),
                "beside": self.learner.beside()[0],
                "replay": self.replay.state() if self.replay.entries else [],
                "records": dict(self.records.lines), "threads": torch.get_num_threads(),
                "keeps_reference": self.learner.policy.reference_adapter is not None}

    def restore_reference(self, folder: Path, saved: dict[str, Any]) -> None:
        """Restore the KL reference if the saved run had one (without a file, it is the base model), and the adapter of
        a teacher that follows the policy."""
        policy = self.learner.policy
        if policy.reference_adapter is not None and saved.get("keeps_reference", True):
            policy.reference_adapter = checkpoint.load_kept(folder, "reference", policy.trained.values())
        if policy.teacher_adapter is not None:
            policy.teacher_adapter = checkpoint.load_kept(folder, "teacher", policy.trained.values()
                                                          ) or policy.teacher_adapter

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore what `snapshot` saved, and warn of settings that differ from those of the saved run."""
        now = self.settings
        changed = {k: f"{k}: {v} -> {now[k]}" for k, v in saved["config"].items() if k in now and str(now[k]) != str(v)}
        if changed:
            logger.warning("resuming with other settings than the run had: %s", "; ".join(changed.values()))
        if kept := [name for name in OF_OPTIMIZER if name in changed]:
            logger.warning("%s of the run go on, as the optimizer's state holds them (as in transformers); for others "
                           "begin a new run with its adapter", ", ".join(kept))
        threads, before = torch.get_num_threads(), saved.get("threads")  # older checkpoints do not say
        if before not in (None, threads) and self.learner.policy.device.type == "cpu":
            logger.warning("the run computed with OMP_NUM_THREADS=%s and goes on with %d: samples may be rounded "
                           "otherwise; set it as it was to go on bit for bit", before, threads)
        for name, value in saved["trainer"].items():
            if name not in OF_SETTINGS:
                setattr(self.state, name, value)
        if best := self.state.best_model_checkpoint:
            here = self.run_dir / Path(best).name  # the run directory may have been moved
            self.state.best_model_checkpoint = str(here) if here.is_dir() else best
        self.source.restore(saved["source"])
        self.learner.scaler.load_state_dict(saved["scaler"])
        self.memory.restore(saved.get("memory"))  # older checkpoints have none
        self.learner.objective.restore(saved.get("objective", {}))
        kept, generations = saved.get("replay", []), self.config.completions_per_prompt
        self.replay.restore(kept, self.source.dataset, self.reward_names, generations,
                            getattr(self.source, "encoder", None))
        self.learner.optimizer.zero_grad(set_to_none=True)  # gradients of a failed step
        self.learner.prepared, self.learner.whole = None, True
        self.mark()
