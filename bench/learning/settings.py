"""The settings that bench/learning/bench.py compares."""

from dataclasses import dataclass, field
from typing import Any

COMMON: dict[str, Any] = {  # settings of every run
    "learning_rate": 3e-3, "max_completion_length": 64, "per_device_train_batch_size": 64,
    "gradient_accumulation_steps": 2, "num_generations": 8, "adam_beta2": 0.99, "lr_scheduler_type": "linear",
    "save_strategy": "no", "disable_tqdm": True, "parity_steps": 0,
}


@dataclass(frozen=True)
class Setting:
    """A line of the table: the differences from on-policy dr_grpo with the transformers engine."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    engine: str = "transformers"
    four_bit: bool = False
    stale: int = 0  # updates between drawing samples and training on them
    like: str | None = None  # the setting that it must agree with, within the noise of seeds


DR_GRPO = {"loss_type": "dr_grpo", "scale_rewards": "none"}
FASTER = {"train_while_sampling": "parallel", "score_while_sampling": True}
SETTINGS = (
    Setting("dr_grpo", DR_GRPO),
    Setting("grpo", {"loss_type": "grpo"}),
    Setting("dapo", {"loss_type": "dapo", "epsilon_high": 0.28}),
    Setting("gspo", {"loss_type": "gspo"}),
    Setting("cispo", {"loss_type": "cispo"}),
    Setting("rloo", {"loss_type": "dapo", "advantage_estimator": "rloo"}),
    Setting("reinforce++", {"loss_type": "dapo", "advantage_estimator": "reinforce++"}),
    Setting("dr_grpo, 4-bit", DR_GRPO, four_bit=True, like="dr_grpo"),
    Setting("dr_grpo, one by one", DR_GRPO | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 128},
            like="dr_grpo"),
    Setting("dr_grpo, vLLM", DR_GRPO, engine="vllm", like="dr_grpo"),
    Setting("dr_grpo, one step stale", DR_GRPO | {"vllm_importance_sampling_correction": False}, stale=1),
    Setting("dr_grpo, one step stale, corrected", DR_GRPO, stale=1, like="dr_grpo"),
    Setting("dr_grpo, trained while sampling", DR_GRPO | FASTER, like="dr_grpo"),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}
