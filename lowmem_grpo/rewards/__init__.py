"""Reward functions: the contract's caller, the GSM8K set, and a penalty on length."""

from lowmem_grpo.rewards.gsm8k import (
    SYSTEM_PROMPT,
    correctness_reward_func,
    extract_hash_answer,
    extract_xml_answer,
    int_reward_func,
    soft_format_reward_func,
    strict_format_reward_func,
    xmlcount_reward_func,
)
from lowmem_grpo.rewards.overlong import soft_overlong_penalty
from lowmem_grpo.rewards.scorer import RewardError, RewardScorer, Scores

__all__ = [
    "SYSTEM_PROMPT", "RewardError", "RewardScorer", "Scores", "correctness_reward_func", "extract_hash_answer",
    "extract_xml_answer", "int_reward_func", "soft_format_reward_func", "soft_overlong_penalty",
    "strict_format_reward_func", "xmlcount_reward_func",
]
