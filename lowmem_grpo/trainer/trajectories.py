"""Training on groups that the caller sampled: an agent in plain Python plays, and each call of `step` is one update.

    with trainer.running():
        while ...:
            groups = ...                    # rollouts made of turns (rollout/rollout_func.py), each with its `reward`
            metrics = trainer.step(groups)

Everything else is as in every run: records, checkpoints, alarms, the check of the sampler, the report at the end.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import Any

from lowmem_grpo.config.from_trl import settings_of
from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.losses.advantages import ESTIMATORS
from lowmem_grpo.losses.loss_settings import OF_TYPES
from lowmem_grpo.losses.loss_types import LOSS_TYPES
from lowmem_grpo.runs.views.live import LiveView, shown
from lowmem_grpo.runs.whole_files import list_checkpoints
from lowmem_grpo.trainer.grpo import GRPOTrainer
from lowmem_grpo.trainer.preflight.subject import Turns
from lowmem_grpo.types import Rollout, RolloutGroup

REWARD = "reward"  # the name of the caller's reward among those of a rollout
TASKS = [{"prompt": [{"role": "user", "content": "A task of the caller's."}]}]  # what preflight tries the template with
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
    "load_best_model_at_end": "every step has its checkpoint; take the one that you want",
}


class TrajectoryView(LiveView):
    """A line for each step, without a panel: the terminal belongs to the caller's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = False

    def line(self, logs: dict[str, float]) -> str:
        """Without an end and the time until then, where nobody knows them; the caller's own numbers as they are."""
        if "loss" not in logs:
            own = (f"{name} {shown(name, value)}" for name, value in logs.items() if name not in ("step", "epoch"))
            return "  ".join([f"step {logs['step']:.0f}", *own])
        head, *middle, left = super().line(logs).split("  ")
        known = self.step < self.max_steps
        return "  ".join([head, *middle, left] if known else [head.partition("/")[0], *middle])


def own_reward(completions: list[Any], **_: Any) -> list[None]:
    """The caller's reward, which comes with the rollouts and is never asked for."""
    return [None] * len(completions)


own_reward.__name__ = REWARD


class TrajectoryTrainer(GRPOTrainer):
    """GRPO on given groups. `max_steps` -1 is a run whose end only the caller knows; its schedule must be constant.

    Of several ranks each gives the groups that it has sampled, perhaps none, and a step trains on all of them.
    """

    view_class = TrajectoryView
    takes_prompts = False

    def __init__(
        self, model: Any, args: Any = None, processing_class: Any = None, callbacks: list[Any] | None = None,
        optimizers: Any = (None, None),
    ) -> None:
        """ValueError for settings that have a meaning only where the trainer samples."""
        config = settings_of(args, GRPOConfig)
        check(config)
        self.given: list[RolloutGroup] = []
        self.own: list[RolloutGroup] = []  # those among them that were sampled in this process
        self.extra: dict[str, float] = {}
        super().__init__(model, [own_reward], config, TASKS, processing_class=processing_class, callbacks=callbacks,
                         optimizers=optimizers)
        self.turns = Turns(replies=True, begins=True)
        self.open_end = config.max_steps < 1
        self.state.max_steps = 0 if self.open_end else config.max_steps
        self.ended = time.perf_counter()

    def lengths(self, context: int) -> tuple[int, int]:
        """The model's context bounds what the caller may sample, and nothing else does."""
        return context - 1, context

    @contextmanager
    def running(self, resume: bool | str | None = None) -> Iterator[None]:
        """Inside, `step` can be called. None goes on from the newest checkpoint in output_dir, if there is one; a new
        run begins with a checkpoint of step 0. Afterwards the run is `finished`, or `failed` after an error."""
        with self.ranks.together():
            self.check_before()
            kept = self.ranks.first("the checkpoints", lambda: bool(list_checkpoints(self.run_dir)))
            goes_on = kept if resume is None else resume
            with super().running(goes_on):
                if not goes_on:
                    self.save_state()
                self.ended = time.perf_counter()
                yield

    def step(
        self, groups: list[RolloutGroup], metrics: Mapping[str, float] | None = None, **changes: Any
    ) -> dict[str, Any]:
        """One update on these groups, whose rollouts have their `reward`; returns the line that was logged. `metrics`
        go into that line as they are, those of the first rank. `changes` are settings for this step only, of PER_STEP,
        the same in all ranks. ValueError for other settings, for no groups, and where all `max_steps` are made."""
        together = self.of_all(groups, changes)
        if not together or not all(group.rollouts for group in together):
            raise ValueError("there is nothing to train on: a step needs groups, each with its rollouts")
        with self.changed(changes), self.interrupt.watch(), self.ranks.together():
            if self.open_end:
                self.state.max_steps = self.state.global_step + self.args.num_iterations
            if self.finished:
                raise ValueError(f"all {self.state.max_steps} steps (max_steps) are made; make a trainer with more")
            self.given, self.own, self.extra = together, groups, dict(metrics or {})
            self.train_step()
        self.given, self.own, self.ended = [], [], time.perf_counter()
        if self.interrupt.requested:
            raise KeyboardInterrupt("stopped after a step, which is saved")
        return dict(self.state.log_history[-1])

    def of_all(self, groups: list[RolloutGroup], changes: Mapping[str, Any]) -> list[RolloutGroup]:
        """The groups of all ranks, in their order. ValueError where a rank has other changes of settings."""
        told = self.ranks.gather("the groups of a step", (groups, repr(sorted(changes.items()))))
        if different := [rank for rank, (_, words) in enumerate(told) if words != told[0][1]]:
            raise ValueError(f"the ranks train a step with different settings: rank 0 with {told[0][1]}, rank "
                             f"{different[0]} with {told[different[0]][1]}; give all of them the same")
        return [group for own, _ in told for group in own]

    @contextmanager
    def changed(self, changes: Mapping[str, Any]) -> Iterator[None]:
        """Inside, the run has other settings."""
        if wrong := [name for name in changes if name not in PER_STEP]:
            raise ValueError(f"{', '.join(wrong)} cannot change from step to step; set it when the trainer is made. "
                             f"What can change: {', '.join(PER_STEP)}")
        usual = self.args
        options: dict[str, Any] = {**self.of_another_loss(changes), **changes}
        now = replace(usual, **options)
        check(now)
        self.use(now)
        try:
            yield
        finally:
            self.use(usual)

    def of_another_loss(self, changes: Mapping[str, Any]) -> dict[str, None]:
        """The options of the run's loss type that the step's own does not have."""
        of_step = LOSS_TYPES.get(changes.get("loss_type", ""))
        return {} if of_step is None else {
            name: None for name in OF_TYPES if name not in of_step.options and name not in changes}

    def note(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Write the caller's own line into the records of a step, by default the last, and tell the listeners."""
        line = {"step": self.state.global_step if step is None else step, **values}
        self.records.metrics(line)
        self.log(line)

    def use(self, config: GRPOConfig) -> None:
        """Let every part that looks at settings in a step have these."""
        self.args = self.objective.config = self.learner.config = config
        self.scoring.settings = self.scoring.credit = config
        optimizer, scheduler = self.learner.optimizer, self.learner.scheduler
        if any(rate != config.learning_rate for rate in scheduler.base_lrs):
            scheduler.base_lrs = [config.learning_rate] * len(scheduler.base_lrs)
            for group, factor in zip(optimizer.param_groups, factors(scheduler), strict=True):
                group["initial_lr"], group["lr"] = config.learning_rate, config.learning_rate * factor

    def next_groups(self) -> list[RolloutGroup]:
        """The given groups, scored and checked; the time since the last step was the caller's sampling."""
        began, now = min(self.ended, self.clock.started), time.perf_counter()
        self.clock.started, self.clock.seconds["generate"] = began, now - began
        for group in self.given:
            for rollout in group.rollouts:
                pay(rollout)
        self.scoring.assign(self.given)
        self.collector.take_in(self.given, self.to_check(self.own))
        return self.given

    def to_check(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Return what the policy as it is now drew at its own temperature: only for this can the trainer agree."""
        version = self.state.policy_version
        return [replace(group, rollouts=[rollout for rollout in group.rollouts if all(
            turn.exact and turn.policy_version == version for turn in rollout.turns)]) for group in groups]

    def parts(self, groups: list[RolloutGroup]) -> list[list[RolloutGroup]]:
        return [groups]

    def measured(self, before: int, groups: list[RolloutGroup], timing: dict[str, float]) -> dict[str, Any]:
        """Also how old the policy was that drew the rollouts, and what the caller measured."""
        version = self.state.policy_version - (self.state.global_step - before)
        ages = [version - rollout.policy_version for group in groups for rollout in group.rollouts]
        metrics = {name: value for name, value in super().measured(before, groups, timing).items()
                 if not name.startswith(f"rewards/{REWARD}/")}  # the one reward is `reward`
        return {**metrics, "trajectories/staleness": fmean(ages), "trajectories/max_staleness": max(ages), **self.extra}

    def describe(self, status: str) -> dict[str, Any]:
        return super().describe(status) | {"method": "trajectories"}


def check(config: GRPOConfig) -> None:
    """ValueError, by name, for a setting that has no meaning where the caller samples."""
    usual = GRPOConfig()
    for name, fix in REFUSED.items():
        if getattr(config, name) != getattr(usual, name):
            raise ValueError(f"{name} is {getattr(config, name)!r}: {fix}")
    if config.save_strategy == "epoch":
        raise ValueError("save_strategy is 'epoch', and the caller's groups have no epochs; set 'steps', or 'no'")
    if config.advantage_estimator == "remax":
        others = ", ".join(name for name in ESTIMATORS if name != "remax")
        raise ValueError(f"advantage_estimator is 'remax', which needs a greedy rollout of each task; take {others}")
    if config.max_steps < 1 and config.lr_scheduler_type not in ("constant", "constant_with_warmup"):
        raise ValueError(f"lr_scheduler_type is {config.lr_scheduler_type!r}, and nothing says how long the run is: "
                         "set max_steps, or lr_scheduler_type='constant'")


def pay(rollout: Rollout) -> None:
    """The caller's reward as that of a reward function. NaN and infinities keep a step from being made, as in GRPO."""
    value = rollout.reward
    finite = value is not None and math.isfinite(value)
    rollout.rewards = {REWARD: value if finite else None}
    rollout.invalid_rewards = {} if finite or value is None else {REWARD: value}


def factors(scheduler: Any) -> list[float]:
    """Return the current factor of the schedule for each parameter group's learning rate."""
    return [float(factor(scheduler.last_epoch)) for factor in scheduler.lr_lambdas]
