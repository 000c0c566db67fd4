"""Reward functions: the contract's caller, and the GSM8K set."""

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
from lowmem_grpo.rewards.scorer import RewardError, RewardScorer, Scores

__all__ = [
    "SYSTEM_PROMPT", "RewardError", "RewardScorer", "Scores", "correctness_reward_func", "extract_hash_answer",
    "extract_xml_answer", "int_reward_func", "soft_format_reward_func", "strict_format_reward_func",
    "xmlcount_reward_func",
]
