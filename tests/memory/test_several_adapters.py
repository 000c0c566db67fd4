"""A critic and a reward model beside the policy, and a pair's two sides, weighed on fake tensors."""

import pytest

from bench.memory.several_adapters import weigh_whole
from lowmem_grpo.memory.model_shape import ModelShape, named_config

CONFIG = named_config("llama-3.1-8b")
pytestmark = pytest.mark.slow


def test_a_critic_and_a_reward_model_would_take_more_than_their_adapters_and_the_critics_states() -> None:
    """By hand: two adapters in float32, and 8-bit states of one, with scales of 256 numbers. In all, at most 1.15 times
    GRPO's own peak, with the reference and completions of 2,048 tokens, one in a micro-batch."""
    alone, several = (weigh_whole(CONFIG, 1, method) for method in ("grpo", "ppo"))
    numbers = ModelShape.from_config(CONFIG).lora_weights(32)
    assert several - alone == pytest.approx(numbers * (2 * 4 + 2 + 2 * 4 / 256), rel=1e-3)
    assert several <= 1.15 * alone


def test_a_pair_would_take_more_than_two_completions_of_a_prompt_in_grpo() -> None:
    pair, group = (weigh_whole(CONFIG, 2, method) for method in ("dpo", "grpo"))
    assert pair == pytest.approx(group, rel=0.01)
