"""GRPO fine-tuning on one GPU, in a fraction of the usual memory. Each name is imported at first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_grpo.config.distillation import DistillationConfig, SDFTConfig, SDPOConfig
    from lowmem_grpo.config.grpo import GRPOConfig, RLOOConfig
    from lowmem_grpo.config.preferences import DPOConfig, KTOConfig, ORPOConfig, RewardConfig
    from lowmem_grpo.config.sampling import SamplingParams, vLLMSamplingParams
    from lowmem_grpo.config.sft import SFTConfig
    from lowmem_grpo.data.chat_template import get_chat_template, standardize_data_formats, standardize_sharegpt
    from lowmem_grpo.integrations.unsloth_names import PatchDPOTrainer, PatchFastRL, PatchKTOTrainer, unsloth_train
    from lowmem_grpo.loader import FastLanguageModel, FastModel, FastVisionModel
    from lowmem_grpo.models.card_check import is_bfloat16_supported
    from lowmem_grpo.models.new_tokens import add_new_tokens
    from lowmem_grpo.rewards.ready.written_functions import (
        check_python_modules,
        create_locked_down_function,
        execute_with_time_limit,
    )
    from lowmem_grpo.rollout.rollout_func import generate_rollout_completions
    from lowmem_grpo.trainer.distillation import DistillationTrainer, SDFTTrainer, SDPOTrainer
    from lowmem_grpo.trainer.grpo import GRPOTrainer, RLOOTrainer
    from lowmem_grpo.trainer.preferences import DPOTrainer, KTOTrainer, ORPOTrainer
    from lowmem_grpo.trainer.reward_model import RewardTrainer
    from lowmem_grpo.trainer.sft import SFTTrainer

__version__ = "0.1.0"
__all__ = [
    "DPOConfig", "DPOTrainer", "DistillationConfig", "DistillationTrainer", "FastLanguageModel", "FastModel",
    "FastVisionModel", "GRPOConfig", "GRPOTrainer", "KTOConfig", "KTOTrainer", "ORPOConfig", "ORPOTrainer",
    "PatchDPOTrainer", "PatchFastRL", "PatchKTOTrainer", "RLOOConfig", "RLOOTrainer", "RewardConfig", "RewardTrainer",
    "SDFTConfig", "SDFTTrainer", "SDPOConfig", "SDPOTrainer", "SFTConfig", "SFTTrainer", "SamplingParams",
    "add_new_tokens", "check_python_modules", "create_locked_down_function", "execute_with_time_limit",
    "generate_rollout_completions", "get_chat_template", "is_bfloat16_supported", "standardize_data_formats",
    "standardize_sharegpt", "unsloth_train", "vLLMSamplingParams",
]

HOMES = {
    **dict.fromkeys(("FastLanguageModel", "FastModel", "FastVisionModel"), "loader"),
    **dict.fromkeys(("PatchDPOTrainer", "PatchFastRL", "PatchKTOTrainer", "unsloth_train"),
                    "integrations.unsloth_names"),
    **dict.fromkeys(("get_chat_template", "standardize_data_formats", "standardize_sharegpt"), "data.chat_template"),
    **dict.fromkeys(("SamplingParams", "vLLMSamplingParams"), "config.sampling"),
    **dict.fromkeys(("GRPOConfig", "RLOOConfig"), "config.grpo"), "SFTConfig": "config.sft",
    **dict.fromkeys(("GRPOTrainer", "RLOOTrainer"), "trainer.grpo"), "SFTTrainer": "trainer.sft",
    **dict.fromkeys(("DistillationConfig", "SDFTConfig", "SDPOConfig"), "config.distillation"),
    **dict.fromkeys(("DistillationTrainer", "SDFTTrainer", "SDPOTrainer"), "trainer.distillation"),
    **dict.fromkeys(("DPOConfig", "KTOConfig", "ORPOConfig", "RewardConfig"), "config.preferences"),
    **dict.fromkeys(("DPOTrainer", "KTOTrainer", "ORPOTrainer"), "trainer.preferences"),
    "RewardTrainer": "trainer.reward_model",
    "is_bfloat16_supported": "models.card_check", "add_new_tokens": "models.new_tokens",
    "generate_rollout_completions": "rollout.rollout_func",
    **dict.fromkeys(("check_python_modules", "create_locked_down_function", "execute_with_time_limit"),
                    "rewards.ready.written_functions"),
}


def __getattr__(name: str) -> Any:
    if name == "pictures":  # a submodule, which HOMES does not list
        return import_module("lowmem_grpo.runs.views.pictures")
    if name not in HOMES:
        elsewhere = import_module("lowmem_grpo.integrations.unsloth_names")
        if name in elsewhere.ALIASES:
            return __getattr__(elsewhere.ALIASES[name])
        if name in elsewhere.REFUSED and name.endswith(("Trainer", "Config")):
            return elsewhere.refused_class(name)
        elsewhere.refuse_name(name)
        raise AttributeError(f"module 'lowmem_grpo' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"lowmem_grpo.{HOMES[name]}"), name)
