"""The settings of a run on the caller's groups, and changes of some of them for a single step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from lowmem_grpo.config.grpo import GRPOConfig, check_weights
from lowmem_grpo.losses.advantages import ESTIMATORS
from lowmem_grpo.losses.loss_settings import OF_TYPES
from lowmem_grpo.losses.loss_types import LOSS_TYPES
from lowmem_grpo.trainer.optim import set_learning_rate

REWARD = "reward"  # the name of the caller's reward among those of a rollout
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


class StepSettings:
    """The settings object that all parts of a run share, with changes for a single step."""

    def __init__(self, config: GRPOConfig, scheduler: LRScheduler) -> None:
        self.config, self.scheduler = config, scheduler

    @contextmanager
    def changed(self, changes: Mapping[str, Any]) -> Iterator[None]:
        """Apply changes to the settings inside the context. ValueError for those that cannot change between steps."""
        if wrong := [name for name in changes if name not in PER_STEP]:
            raise ValueError(f"{', '.join(wrong)} cannot change from step to step; set it when the trainer is made. "
                             f"What can change: {', '.join(PER_STEP)}")
        options: dict[str, Any] = {**options_of_another_loss(changes), **changes}
        step = replace(self.config, **options)
        check_given(step)
        usual = dict(vars(self.config))
        try:
            self.set_all(vars(step))
            yield
        finally:
            self.set_all(usual)

    def set_all(self, values: Mapping[str, Any]) -> None:
        vars(self.config).update(values)
        set_learning_rate(self.scheduler, self.config.learning_rate)


def options_of_another_loss(changes: Mapping[str, Any]) -> dict[str, None]:
    """Return None for each loss option that the step's loss type does not have, to unset the run's."""
    of_step = LOSS_TYPES.get(changes.get("loss_type", ""))
    return {} if of_step is None else {
        name: None for name in OF_TYPES if name not in of_step.options and name not in changes}


def check_given(config: GRPOConfig) -> None:
    """Raise ValueError, with its name, for a setting that has no meaning if the caller samples."""
    usual = GRPOConfig()
    check_weights(config.reward_weights, [REWARD])
    if config.reward_weights == [0]:
        raise ValueError("reward_weights is [0]: nothing pays; leave it out")
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
