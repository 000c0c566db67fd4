"""Sequences that vLLM leaves unfinished and goes on with in another call."""

import pytest
from vllm_models import NEEDS_VLLM, SAME, differences, ids_of

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Until
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.models.policy import Policy

pytestmark = [*NEEDS_VLLM, pytest.mark.slow]
PARAMS = SamplingParams(n=3, max_tokens=50, seed=3, temperature=1.5, stop_token_ids=list(range(0, 320, 17)))


def test_a_call_leaves_what_is_unfinished_and_the_next_goes_on_with_it(
    engine: VLLMEngine, policy: Policy, prompts: list[list[int]]
) -> None:
    full, until = engine.generate(prompts, PARAMS), Until(3, prompts=1)
    first = engine.generate(prompts, PARAMS, until=until)
    assert sum(map(bool, first)) >= 1 and 0 < len(until.left) == sum(not group for group in first)
    assert not engine.unfinished
    for prompt, group in until.left.items():
        assert {one.finish_reason for one in group} >= {"unfinished"}
        for one, whole in zip(group, full[prompt], strict=True):
            assert one.completion_ids == whole.completion_ids[: len(one.completion_ids)]
            assert one.rollout_logprobs == pytest.approx(whole.rollout_logprobs[: len(one.completion_ids)], abs=1e-4)
    again = Until(3, begun=until.left)
    second = engine.generate(prompts, PARAMS, until=again)
    assert not again.left
    for prompt, begun in until.left.items():
        for one, before in zip(second[prompt], begun, strict=True):
            assert one.completion_ids[: len(before.completion_ids)] == before.completion_ids
            assert one.finish_reason in ("stop", "length") and len(one.completion_ids) <= PARAMS.max_tokens
            assert before.finish_reason == "unfinished" or one.completion_ids == before.completion_ids
            assert one.text == engine.tokenizer.decode(one.completion_ids, skip_special_tokens=True)
    assert differences(policy, prompts, second, PARAMS.temperature).abs().mean() < SAME


def test_greedy_sequences_that_are_carried_are_those_of_one_call(
    engine: VLLMEngine, prompts: list[list[int]]
) -> None:
    greedy = SamplingParams(n=1, max_tokens=30, temperature=0, stop_token_ids=list(range(0, 320, 17)))
    until = Until(1, prompts=1)
    first = engine.generate(prompts, greedy, until=until)
    second = engine.generate(prompts, greedy, until=Until(1, begun=until.left))
    found = [second[place] if place in until.left else group for place, group in enumerate(first)]
    assert ids_of(found) == ids_of(engine.generate(prompts, greedy))


def test_a_prompt_that_must_be_finished_is_waited_for(engine: VLLMEngine, prompts: list[list[int]]) -> None:
    for place in range(len(prompts)):
        until = Until(3, prompts=1, surely=frozenset([place]))
        assert len(engine.generate(prompts, PARAMS, until=until)[place]) == 3 and place not in until.left
