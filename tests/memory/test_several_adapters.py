"""A critic and a reward model beside the policy, weighed on fake tensors."""

import pytest

from bench.memory.several_adapters import weigh_whole
from lowmem_grpo.memory.model_shape import ModelShape, named_config


@pytest.mark.slow
def test_a_critic_and_a_reward_model_would_take_more_than_their_adapters_and_the_critics_states() -> None:
    """By hand: two adapters in float32, and 8-bit states of one, with scales of 256 numbers. In all, at most 1.15 times
    GRPO's own peak, with the reference and 8 completions of 2,048 tokens, one in a micro-batch."""
    config = named_config("llama-3.1-8b")
    alone, several = (weigh_whole(config, 1, both) for both in (False, True))
    numbers = ModelShape.from_config(config).lora_weights(32)
    assert several - alone == pytest.approx(numbers * (2 * 4 + 2 + 2 * 4 / 256), rel=1e-3)
    assert several <= 1.15 * alone
