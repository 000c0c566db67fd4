"""Training on groups that the caller sampled, for example with agents in plain Python. Each `step` call is one update.

    with trainer.running():
        while ...:
            groups = ...                    # rollouts made of turns (rollout/rollout_func.py), each with its `reward`
            metrics = trainer.step(groups)
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from types import MappingProxyType
from typing import Any

from lowmem_grpo.config.from_trl import settings_of
from lowmem_grpo.config.grpo import GRPOConfig, check_weights
from lowmem_grpo.losses.advantages import ESTIMATORS, GAE, assign_advantages
from lowmem_grpo.losses.credit import assign_credit
from lowmem_grpo.losses.loss_settings import OF_TYPES
from lowmem_grpo.losses.loss_types import LOSS_TYPES
from lowmem_grpo.rollout.scoring import rollout_metrics, waiting_share
from lowmem_grpo.runs.saved_adapter import list_checkpoints
from lowmem_grpo.runs.views.live import TrajectoryView
from lowmem_grpo.trainer.lifecycle import running
from lowmem_grpo.trainer.parts import PolicyParts, bring_model, first_engine, make_policy_parts, tokens_of_row
from lowmem_grpo.trainer.preflight.subject import Turns
from lowmem_grpo.trainer.step_accumulator import members
from lowmem_grpo.trainer.trl_api import TrlApi
from lowmem_grpo.types import Rollout, RolloutGroup
from lowmem_grpo.utils import check_ranges, field_value

REWARD = "reward"  # the name of the caller's reward in `Rollout.rewards`
PER_STEP = (  # settings that may differ from step to step
    "learning_rate", "num_iterations", "max_grad_norm", "mask_truncated_completions", "save_strategy", "scale_rewards",
    "advantage_estimator", "pass_at_k", "turn_discount", "loss_type", *OF_TYPES, "beta", "kl_estimator",
    "use_bias_correction_kl", "off_policy_mask_threshold", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
)
SAMPLED_HERE = "groups are sampled by the caller; leave it out"
REFUSED = {  # settings of a trainer that samples, and what to do
    **dict.fromkeys(("dynamic_sampling_rounds", "difficulty_pools", "replay_buffer_size", "steps_per_generation",
                     "num_generations_eval"), SAMPLED_HERE),
    "vllm_max_model_length": "load with a smaller max_seq_length, or bound your own calls with max_tokens",
    "eval_strategy": "evaluate with your own rollouts, and log them under the split val",
    "teacher": "a teacher reads what GRPOTrainer samples; leave it out",
    "load_best_model_at_end": "every step has its checkpoint; take the one that you want",
}


class TrajectoryTrainer(TrlApi):
    """GRPO on groups that the caller samples. `max_steps` -1 is an open-ended run; its schedule must be constant. Each
    rank passes the groups that it sampled, perhaps none, and a step trains on the groups of all ranks."""

    args: GRPOConfig
    parts: PolicyParts
    view_class = TrajectoryView
    method = "trajectories"
    does_sampling = True

    def __init__(
        self, model: Any, args: Any = None, processing_class: Any = None, callbacks: list[Any] | None = None,
        optimizers: Any = (None, None),
    ) -> None:
        """Raise ValueError for settings that apply only if the trainer samples."""
        config = replace(settings_of(args, GRPOConfig))  # shared by all parts; a step may change it
        check_given(config)
        trained = bring_model(model, config, processing_class, tokens=tokens_of_row(config), takes_prompts=False)
        self.turns = Turns(replies=True, begins=True)
        self.engine: Any = first_engine(trained, config)  # the model's engine, which measures its pace
        super().__init__(
            make_policy_parts(trained, config, NoPrompts(), self.engine, trained.context, optimizers,
                              keeps_reference=True),
            callbacks, rewards={REWARD: (config.reward_weights or [1.0])[0]})
        self.settings = StepSettings(config, self.learner.scheduler)
        self.open_end = config.max_steps < 1
        self.state.max_steps = 0 if self.open_end else config.max_steps
        self.ended = time.perf_counter()
        self.taken: dict[str, float] = {}  # metrics of the groups of the step in progress
        self.extra: dict[str, float] = {}  # the caller's metrics of that step

    @contextmanager
    def running(self, resume: bool | str | None = None) -> Iterator[None]:
        """Begin a run, in which `step` can be called. `resume=None` continues from the newest checkpoint in output_dir,
        if there is one. A new run begins with a checkpoint of step 0."""
        with self.ranks.together():
            self.check_before()
            kept = self.ranks.first("the checkpoints", lambda: bool(list_checkpoints(self.run_dir)))
            goes_on = kept if resume is None else resume
            with running(self, goes_on):
                self.notify("on_epoch_begin")
                if not goes_on:
                    self.save_state()
                self.ended = time.perf_counter()
                yield
                self.notify("on_epoch_end")

    def step(
        self, groups: list[RolloutGroup], metrics: Mapping[str, float] | None = None, **changes: Any
    ) -> dict[str, Any]:
        """Run one update on these groups, whose rollouts have a `reward`, and return the step's metrics, with the first
        rank's `metrics` added. `changes` are settings for this step only, from PER_STEP, the same in all ranks.
        ValueError for other settings, for no groups, and after `max_steps` steps."""
        together = self.of_all(groups, changes)
        if not together or not all(group.rollouts for group in together):
            raise ValueError("there is nothing to train on: a step needs groups, each with its rollouts")
        with self.settings.changed(changes), self.interrupt.watch(), self.ranks.together():
            if self.open_end:
                self.state.max_steps = self.state.global_step + self.args.num_iterations
            if self.finished:
                raise ValueError(f"all {self.state.max_steps} steps (max_steps) are made; make a trainer with more")
            self.start_step()
            with self.saver.saved_before(self.save_state, self.interrupt):
                self.taken, self.extra = self.take_in(together, groups), dict(metrics or {})
                self.train_step(together)
        self.ended = time.perf_counter()
        if self.interrupt.requested:
            if self.saver.saved < self.state.global_step:
                self.save_state()
            raise KeyboardInterrupt("stopped after a step, which is saved")
        return {"step": self.state.global_step, **(self.state.unlogged or self.state.log_history)[-1]}

    def of_all(self, groups: list[RolloutGroup], changes: Mapping[str, Any]) -> list[RolloutGroup]:
        """Return the groups of all ranks, in rank order. ValueError if the ranks' `changes` differ."""
        told = self.ranks.gather("the groups of a step", (groups, repr(sorted(changes.items()))))
        if different := [rank for rank, (_, words) in enumerate(told) if words != told[0][1]]:
            raise ValueError(f"the ranks train a step with different settings: rank 0 with {told[0][1]}, rank "
                             f"{different[0]} with {told[different[0]][1]}; give all of them the same")
        return [group for own, _ in told for group in own]

    def note(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Log and record the caller's values for `step`, by default the last step."""
        line = {"step": self.state.global_step if step is None else step, **values}
        self.records.metrics(line)
        self.log(line)

    def take_in(self, groups: list[RolloutGroup], own: list[RolloutGroup]) -> dict[str, float]:
        """Set the advantages of a step's groups, run the parity check on this rank's groups `own`, and return metrics.
        The time since the last step counts as sampling."""
        began, now = min(self.ended, self.parts.clock.started), time.perf_counter()
        self.parts.clock.started, self.parts.clock.seconds["generate"] = began, now - began
        rollouts = members(groups)
        for rollout in rollouts:
            pay(rollout)
        assign_advantages(groups, [REWARD], self.args)
        assign_credit(groups, self.args, self.args.turn_discount, self.args.state_weight, self.rewards, [])
        pace, tokens = self.engine.pace.pop_measured(), sum(rollout.num_trained for rollout in rollouts)
        self.state.num_tokens += tokens + sum(len(group.prompt_ids) * len(group.rollouts) for group in groups)
        watched = self.ranks.gather("the parity check", self.parts.parity.watch(self.to_check(own)))
        agreed: dict[str, float] = next(filter(None, watched), {})  # all ranks use the same result
        self.parts.parity.take_in(agreed)
        return {**rollout_metrics(groups, []), **agreed, **pace.metrics(), **waiting_share(groups, now - began),
                "data/skipped_rows": 0, "num_tokens": self.state.num_tokens,
                "tokens_per_second": tokens / max(now - began, 1e-9)}

    def to_check(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with only the rollouts of the current policy whose turns are all `exact` (see `Turn`)."""
        version = self.state.policy_version
        return [replace(group, rollouts=[rollout for rollout in group.rollouts if all(
            turn.exact and turn.policy_version == version for turn in rollout.turns)]) for group in groups]

    def measured(self, before: int, groups: list[RolloutGroup], timing: dict[str, float]) -> dict[str, Any]:
        updates = self.state.global_step - before
        ages = [self.state.policy_version - updates - rollout.policy_version for rollout in members(groups)]
        return {**self.taken, **super().measured(before, groups, timing),
                "trajectories/staleness": fmean(ages), "trajectories/max_staleness": max(ages), **self.extra}


def pay(rollout: Rollout) -> None:
    """Store the caller's reward as if a reward function had returned it. NaN or infinity skips the step, as in GRPO."""
    value = rollout.reward
    finite = value is not None and math.isfinite(value)
    rollout.rewards = {REWARD: value if finite else None}
    rollout.invalid_rewards = {} if finite or value is None else {REWARD: value}


class NoPrompts:
    """The prompt source of a run whose groups the caller samples. It has no prompts."""

    reached, last, round, whole, dataset, skipped = 0.0, 0.0, 0, None, (), MappingProxyType[str, int]({})

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Do nothing. Checkpoints of older versions contain a state, which is ignored."""

    def end_epoch(self) -> None:
        """Do nothing: groups that the caller passes have no epochs."""

    def count_rows(self, read: bool = False) -> int:
        return 0


class StepSettings:
    """The settings that all parts of a run share; they can be changed for a single step."""

    def __init__(self, config: GRPOConfig, scheduler: Any) -> None:
        self.config, self.scheduler = config, scheduler

    @contextmanager
    def changed(self, changes: Mapping[str, Any]) -> Iterator[None]:
        """Change the settings inside the context. ValueError for settings that cannot change from step to step."""
        if wrong := [name for name in changes if name not in PER_STEP]:
            raise ValueError(f"{', '.join(wrong)} cannot change from step to step; set it when the trainer is made. "
                             f"What can change: {', '.join(PER_STEP)}")
        changes = {name: field_value(GRPOConfig, name, value) for name, value in changes.items()}
        check_ranges(GRPOConfig, changes)
        usual = dict(vars(self.config))
        of_step = LOSS_TYPES.get(changes.get("loss_type", ""))
        unset = [name for name in OF_TYPES if of_step is not None and name not in of_step.options]  # the run's values
        try:
            self.set_all({**dict.fromkeys(unset), **changes})
            self.config.check_step()
            check_given(self.config)
            yield
        finally:
            self.set_all(usual)

    def set_all(self, values: Mapping[str, Any]) -> None:
        """Set the settings, and the base learning rates of the schedule, which stays at its current step."""
        vars(self.config).update(values)
        own, scheduler = self.config.embedding_learning_rate, self.scheduler
        groups = scheduler.optimizer.param_groups
        rates = [self.config.learning_rate if own is None or "name" not in group else own for group in groups]
        if scheduler.base_lrs == rates:
            return
        scheduler.base_lrs = rates
        for group, factor, rate in zip(groups, scheduler.lr_lambdas, rates, strict=True):
            group["initial_lr"], group["lr"] = rate, rate * float(factor(scheduler.last_epoch))


def check_given(config: GRPOConfig) -> None:
    """Raise ValueError for a setting that has no meaning if the caller samples."""
    check_weights(config.reward_weights, [REWARD])
    if config.needs_teacher:
        raise ValueError(f"args is a {type(config).__name__}, and {REFUSED['teacher']}: take a GRPOConfig")
    if config.reward_weights == [0]:
        raise ValueError("reward_weights is [0]: nothing pays; leave it out")
    for name, fix in REFUSED.items():
        if getattr(config, name) != getattr(GRPOConfig, name):
            raise ValueError(f"{name} is {getattr(config, name)!r}: {fix}")
    if config.save_strategy == "epoch":
        raise ValueError("save_strategy is 'epoch', and the caller's groups have no epochs; set 'steps', or 'no'")
    if config.advantage_estimator == "remax":
        others = ", ".join(name for name in ESTIMATORS if name not in ("remax", GAE))
        raise ValueError(f"advantage_estimator is 'remax', which needs a greedy rollout of each task; take {others}")
    if config.advantage_estimator == GAE:
        raise ValueError(f"advantage_estimator is {GAE!r}, whose critic GRPOTrainer trains; take 'grpo', or another")
    if config.max_steps < 1 and config.lr_scheduler_type not in ("constant", "constant_with_warmup"):
        raise ValueError(f"lr_scheduler_type is {config.lr_scheduler_type!r}, and nothing says how long the run is: "
                         "set max_steps, or lr_scheduler_type='constant'")
