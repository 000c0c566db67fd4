"""Completions of vLLM's engine: settings, seeds, log-probabilities, and where each completion ends."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import load_model, with_adapter
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from vllm_models import CONTEXT, NEEDS_VLLM, SAME, distance, ids_of

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.decoding import truncate
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.models.policy import Policy

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def policy() -> Policy:
    """With all of the embedded model's layers: its completions end, and say what stops them."""
    return Policy(with_adapter(load_model("tiny"), lora_dropout=0.5).eval())


@pytest.fixture
def other(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> TransformersEngine:
    """transformers' engine on the same model."""
    return TransformersEngine(policy, tokenizer, CONTEXT)


def full_logits(policy: Policy, prompt: list[int], completion: list[int]) -> Tensor:
    """(C, V) the trainer's logits of each sampled token."""
    ids = torch.tensor([prompt + completion])
    base = policy.model.get_base_model()
    base.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return policy.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    finally:
        base.set_attn_implementation("lowmem_grpo")


PARAMS: dict[str, dict[str, Any]] = {
    "plain": {}, "ignore_eos": {"ignore_eos": True}, "one token": {"max_tokens": 1}, "cut": {"max_tokens": 7},
    "stop tokens": {"stop_token_ids": [31, 287]}, "stop string": {"stop": "= "}, "stop strings": {"stop": ["qq", "="]},
    "stop string kept": {"stop": "= ", "include_stop_str_in_output": True},
    "stop string that is a special token": {"stop": "<|im_end|>", "ignore_eos": True},
    "special tokens in the text": {"skip_special_tokens": False}, "longer than the context": {"max_tokens": 10_000},
    "stop string that never comes": {"stop": "never", "max_tokens": 20},
}


LONG_LANE = ("ignore_eos", "longer than the context", "special tokens in the text")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name in LONG_LANE)) for name in PARAMS])
@pytest.mark.every(2)
def test_greedy_completions_end_and_read_as_with_transformers_engine(
    engine: VLLMEngine, other: TransformersEngine, prompts: list[list[int]], name: str
) -> None:
    params = replace(SamplingParams(temperature=0, max_tokens=60), **PARAMS[name])
    for (got,), (expected,) in zip(engine.generate(prompts, params), other.generate(prompts, params), strict=True):
        assert got.completion_ids == expected.completion_ids
        assert (got.finish_reason, got.text) == (expected.finish_reason, expected.text)
        difference = torch.tensor(got.rollout_logprobs) - torch.tensor(expected.rollout_logprobs)
        assert difference.abs().mean() < SAME


def test_no_two_completions_share_their_random_numbers(engine: VLLMEngine, prompts: list[list[int]]) -> None:
    params = SamplingParams(n=8, max_tokens=24, ignore_eos=True, temperature=2.0, part=(0, 2))
    drawn = [completion for seed in (7, 8) for group in
             ids_of(engine.generate([prompts[0], prompts[0]], replace(params, seed=seed))) for completion in group]
    assert len({tuple(completion) for completion in drawn}) == 32


def test_a_requests_seed_gives_what_vllms_own_generate_gives(engine: VLLMEngine, prompts: list[list[int]]) -> None:
    settings = {"n": 3, "max_tokens": 12, "ignore_eos": True, "temperature": 1.5, "seed": 7}
    found = ids_of(engine.generate([prompts[0], prompts[1], prompts[0]], SamplingParams(**settings)))
    plain = engine.llm.generate([{"prompt_token_ids": ids} for ids in prompts[:2]],
                                engine.vllm.SamplingParams(**settings), use_tqdm=False)
    wanted = [[tuple(completion.token_ids) for completion in output.outputs] for output in plain]
    assert [[tuple(ids) for ids in group] for group in found] == [wanted[0], wanted[1], wanted[0]]


@pytest.mark.parametrize("options", [
    {}, {"temperature": 1.7}, {"top_k": 8, "min_p": 0.05}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
    *(pytest.param(options, marks=pytest.mark.slow) for options in (
        {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.8})),
], ids=str)
@pytest.mark.every(2)
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(
    engine: VLLMEngine, policy: Policy, prompts: list[list[int]], options: dict[str, Any]
) -> None:
    params = SamplingParams(n=8, max_tokens=16, seed=3, ignore_eos=True, **options)
    found = []
    for prompt, group in zip(prompts, engine.generate(prompts, params), strict=True):
        for rollout in group:
            logits = full_logits(policy, prompt, rollout.completion_ids) / params.temperature
            logprobs = truncate(logits, params).log_softmax(-1)
            expected = logprobs.gather(1, torch.tensor(rollout.completion_ids)[:, None]).squeeze(1)
            found.append(expected - torch.tensor(rollout.rollout_logprobs))
    assert torch.cat(found).abs().max() < 1e-3
    assert torch.cat(found).abs().mean() < SAME


def test_a_seed_works_with_more_prompt_tokens_than_one_pass_reads(engine: VLLMEngine, policy: Policy) -> None:
    llm, prompts = engine.llm, [[(number * 31 + place * 7) % 300 + 3 for place in range(400)] for number in range(12)]
    groups = engine.generate(prompts, SamplingParams(max_tokens=3, seed=2, ignore_eos=True))
    assert distance(policy, prompts, groups) < SAME
    assert engine.llm is llm
