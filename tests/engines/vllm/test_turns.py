"""Turns of episodes in vLLM: they enter between steps, their prefixes are cached, a new engine goes on with them."""

import random
from typing import Any

import pytest
from episodes import Talk
from transformers import PreTrainedTokenizerBase
from vllm_models import CONTEXT, KV_BYTES, LONG, NEEDS_VLLM, SAME, distance, dying, states

from lowmem_grpo.config.loading import EngineSettings
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.engines.vllm.settings import least_kv_bytes
from lowmem_grpo.models.policy import Policy

pytestmark = NEEDS_VLLM
ENDLESS = SamplingParams(ignore_eos=True)
BLOCK = 32  # of our cache on the CPU


def talk(prompts: list[list[int]], **options: Any) -> Talk:
    return Talk(prompts, max_tokens=lambda key, turn: [4, 10, 2][key] + turn, **options)


def test_a_reply_enters_while_other_turns_are_decoded(engine: VLLMEngine, prompts: list[list[int]]) -> None:
    played = talk(prompts)
    engine.converse(played, ENDLESS)
    assert (True, 1) in played.takes, "a turn entered a busy engine"
    idle = [got for busy, got in played.takes if not busy]
    assert idle == [3, 1, 0], "it waits only when it has nothing to decode: the longest episode ends by itself"


def test_what_a_turn_repeats_of_the_last_one_is_taken_from_the_cache(engine: VLLMEngine, policy: Policy) -> None:
    """The tokens that are computed are those of the last, partial block and the new ones."""
    played = Talk([LONG, LONG[:200]], turns=2, max_tokens=lambda key, turn: 60, reply=lambda key, turn: [7] * 30)
    engine.converse(played, ENDLESS)
    for key, rollouts in played.drawn.items():
        asked = [request.ids for request in played.asked if request.key == key]
        assert [rollout.cached_tokens for rollout in rollouts] == [
            0 if key == 0 else 199 // BLOCK * BLOCK, (len(asked[1]) - 31) // BLOCK * BLOCK
        ]
        assert distance(policy, asked[1:], [rollouts[1:]]) < SAME
    again = Talk([LONG])
    engine.on_policy_update(1)
    engine.converse(again, ENDLESS)
    assert again.drawn[0][0].cached_tokens == 0, "old keys and values are not used"
    assert {rollout.policy_version for rollout in again.drawn[0]} == {1}


@pytest.mark.slow
def test_the_users_block_size_is_what_the_cache_keeps_of_a_turn(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, alone: None
) -> None:
    engine = VLLMEngine(policy, tokenizer, CONTEXT, EngineSettings(kv_cache_bytes=KV_BYTES, block_size=256))
    try:
        played = Talk([LONG], turns=2, max_tokens=lambda key, turn: 60)
        engine.converse(played, ENDLESS)
        assert [rollout.cached_tokens for rollout in played.drawn[0]] == [0, 256]
    finally:
        engine.close()
    with pytest.raises(ValueError, match="needs"):  # one whole block is never used
        VLLMEngine(policy, tokenizer, CONTEXT, EngineSettings(kv_cache_bytes=least_kv_bytes(policy, CONTEXT),
                                                              block_size=256))


def test_an_engine_that_dies_is_replaced_and_goes_on_with_the_turns_that_were_not_given(
    engine: VLLMEngine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, played, llm = talk(prompts), talk(prompts), engine.llm
    engine.converse(expected, ENDLESS)

    def once(key: int, rollout: Any) -> None:
        if len(played.given) == 2:
            dying(monkeypatch, RuntimeError("the device is gone"))

    played.on_give = once
    engine.converse(played, ENDLESS)
    assert engine.llm is not llm
    assert sorted(played.given) == sorted([0, 1, 2] * 3), "each turn is given once"
    assert played.ids == expected.ids


@pytest.mark.slow
def test_a_conversation_that_is_broken_off_leaves_nothing_to_the_next(
    engine: VLLMEngine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, again = talk(prompts), talk(prompts)
    engine.converse(expected, ENDLESS)
    with monkeypatch.context() as patched:
        dying(patched, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            engine.converse(talk(prompts), ENDLESS)
    assert engine.outdated
    engine.converse(again, ENDLESS)
    assert again.ids == expected.ids


def test_random_numbers_that_an_environment_draws_are_not_drawn_again(
    engine: VLLMEngine, prompts: list[list[int]]
) -> None:
    drawn: list[float] = []
    before = states()
    engine.converse(talk(prompts), ENDLESS)
    assert states() == before
    for _ in range(2):
        engine.converse(talk(prompts, on_give=lambda key, rollout: drawn.append(random.random())), ENDLESS)
    assert len(set(drawn)) == len(drawn) == 18
