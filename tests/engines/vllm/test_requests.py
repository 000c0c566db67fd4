"""Completions of vLLM's engine: settings, seeds, log-probabilities, and where each completion ends."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import load_model, with_adapter
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from vllm_models import (
    CONTEXT,
    LONG,
    NEEDS_VLLM,
    SAME,
    distance,
    ids_of,
    states,
)

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.decoding import truncate
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.engines.vllm.shared_linear import LAYERS
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


def test_completions_of_a_prompt_share_its_prefill(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    layer = next(iter(LAYERS.values()))
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: rows.append(len(x)) or forward(x))
    (group,) = engine.generate([LONG], SamplingParams(n=8, max_tokens=1, seed=1))
    assert len(group) == 8
    remainder = len(LONG) % 32  # whole blocks are shared
    assert sum(rows) <= len(LONG) + 7 * remainder
    assert sum(rows) >= len(LONG)


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
    params = SamplingParams(n=8, max_tokens=24, ignore_eos=True, temperature=2.0)
    drawn = [completion for seed in (7, 8) for group in
             ids_of(engine.generate([prompts[0], prompts[0]], replace(params, seed=seed))) for completion in group]
    assert len({tuple(completion) for completion in drawn}) == 32


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


def test_tokens_are_drawn_with_their_probabilities(engine: VLLMEngine, policy: Policy) -> None:
    prompt, count = [100], 4000
    groups = engine.generate([prompt] * 4, SamplingParams(n=count // 4, max_tokens=1, seed=5, top_k=6))
    logits = truncate(full_logits(policy, prompt, [0]), SamplingParams(top_k=6))
    expected = logits.softmax(-1)[0] * count
    counts = torch.bincount(torch.tensor([r.completion_ids[0] for g in groups for r in g]), minlength=len(expected))
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert ((counts - expected).square() / expected)[kept].sum() < 25  # 5 degrees of freedom: once in 7,000 seeds


def test_a_thousand_prompts_come_back_in_order(engine: VLLMEngine) -> None:
    prompts = [[number % 300 + 3, 7, number % 11 + 3] for number in range(1000)]
    groups = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
    assert len(groups) == 1000
    few = [0, 299, 300, 654, 999]
    assert [ids_of(groups)[number] for number in few] == ids_of(engine.generate([prompts[number] for number in few],
                                                                 SamplingParams(temperature=0, max_tokens=1)))


def test_a_seed_works_with_more_prompt_tokens_than_one_pass_reads(
    engine: VLLMEngine, policy: Policy
) -> None:
    llm, prompts = engine.llm, [[(number * 31 + place * 7) % 300 + 3 for place in range(400)] for number in range(12)]
    groups = engine.generate(prompts, SamplingParams(max_tokens=3, seed=2, ignore_eos=True))
    assert distance(policy, prompts, groups) < SAME
    assert engine.llm is llm


@pytest.mark.parametrize("seed", [None, 1])
def test_sampling_leaves_the_processs_random_numbers_alone(
    engine: VLLMEngine, prompts: list[list[int]], seed: int | None
) -> None:
    before = states()
    engine.generate(prompts, SamplingParams(n=2, max_tokens=4, seed=seed))
    assert states() == before
