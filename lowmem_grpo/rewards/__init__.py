"""Reward functions, which return a number for each completion, and verifiers, which judge completions right or wrong.
See docs/rewards.md. A submodule is imported when one of its names is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_grpo.rewards.adapter_reward import from_adapter
    from lowmem_grpo.rewards.calling.scorer import RewardError, RewardScorer, Scores
    from lowmem_grpo.rewards.checking.check import RewardCheck, check
    from lowmem_grpo.rewards.judge.judge import judged, ruler
    from lowmem_grpo.rewards.judge.self_judge import SelfJudge
    from lowmem_grpo.rewards.judge.url_judge import UrlJudge
    from lowmem_grpo.rewards.reading import after, boxed, in_tag, last_line, last_number, whole
    from lowmem_grpo.rewards.ready.answers import (
        answer_match,
        boxed_match,
        json_match,
        number_equal,
        number_match,
        number_present,
        proximity,
        regex_match,
    )
    from lowmem_grpo.rewards.ready.code import code_passes_tests
    from lowmem_grpo.rewards.ready.formats import (
        format_kept,
        format_match,
        length_near,
        repetition_penalty,
        soft_overlong_penalty,
        tags_counted,
        too_long,
    )
    from lowmem_grpo.rewards.ready.gsm8k import (
        SYSTEM_PROMPT,
        correctness_reward_func,
        extract_hash_answer,
        extract_xml_answer,
        int_reward_func,
        soft_format_reward_func,
        strict_format_reward_func,
        xmlcount_reward_func,
    )
    from lowmem_grpo.rewards.ready.instructions import follows_instructions
    from lowmem_grpo.rewards.ready.mail import email_rewards, ideal_answer, keyword_present, recipient_named, signed
    from lowmem_grpo.rewards.ready.math_answer import math_match
    from lowmem_grpo.rewards.reward import MeanOf, Reward, Verifier
    from lowmem_grpo.types import Finding

__all__ = [
    "SYSTEM_PROMPT", "Finding", "MeanOf", "Reward", "RewardCheck", "RewardError", "RewardScorer", "Scores",
    "SelfJudge", "UrlJudge", "Verifier", "after", "answer_match", "boxed", "boxed_match", "check",
    "code_passes_tests", "correctness_reward_func", "email_rewards", "extract_hash_answer", "extract_xml_answer",
    "follows_instructions", "format_kept", "format_match", "from_adapter", "ideal_answer", "in_tag",
    "int_reward_func", "json_match", "judged", "keyword_present", "last_line", "last_number", "length_near",
    "math_match", "number_equal", "number_match", "number_present", "proximity", "recipient_named", "regex_match",
    "repetition_penalty", "ruler", "signed", "soft_format_reward_func", "soft_overlong_penalty",
    "strict_format_reward_func", "tags_counted", "too_long", "whole", "xmlcount_reward_func",
]

HOMES = {name: home for home, names in {
    "types": "Finding",
    "rewards.adapter_reward": "from_adapter",
    "rewards.reward": "MeanOf Reward Verifier",
    "rewards.calling.scorer": "RewardError RewardScorer Scores",
    "rewards.checking.check": "RewardCheck check",
    "rewards.judge.judge": "judged ruler",
    "rewards.judge.self_judge": "SelfJudge",
    "rewards.judge.url_judge": "UrlJudge",
    "rewards.ready.answers": "answer_match boxed_match json_match number_equal number_match number_present proximity "
                             "regex_match",
    "rewards.ready.code": "code_passes_tests",
    "rewards.ready.formats": "format_kept format_match length_near repetition_penalty soft_overlong_penalty "
                             "tags_counted too_long",
    "rewards.ready.gsm8k": "SYSTEM_PROMPT correctness_reward_func extract_hash_answer extract_xml_answer "
                           "int_reward_func soft_format_reward_func strict_format_reward_func xmlcount_reward_func",
    "rewards.ready.instructions": "follows_instructions",
    "rewards.ready.mail": "email_rewards ideal_answer keyword_present recipient_named signed",
    "rewards.ready.math_answer": "math_match",
    "rewards.reading": "after boxed in_tag last_line last_number whole",
}.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'lowmem_grpo.rewards' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"lowmem_grpo.{HOMES[name]}"), name)
