"""What is counted of vLLM's steps, against what vLLM itself knows, and how many sequences a cache decodes together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import load_model, with_adapter
from vllm_models import CONTEXT, NEEDS_VLLM, engine_on, policy_of

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.engines.vllm.settings import BLOCK_ON_CPU, kv_bytes_of, least_kv_bytes
from lowmem_grpo.models.policy import Policy

pytestmark = NEEDS_VLLM
PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]


def scheduler_of(engine: VLLMEngine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


def test_every_drawn_token_is_counted_once_and_prompts_once_a_group(engine: VLLMEngine) -> None:
    engine.pace.pop_measured()
    params = SamplingParams(n=4, max_tokens=30, seed=1, stop_token_ids=[*range(0, 320, 20)])
    groups = engine.generate(PROMPTS, params)
    lengths = [len(rollout.completion_ids) for group in groups for rollout in group]
    assert len(set(lengths)) > 1
    pace = engine.pace.pop_measured()
    assert pace.tokens["full"] + pace.tokens["tail"] == sum(lengths) - len(lengths)
    assert pace.tokens["prefill"] == 7 and pace.most == 8 and pace.preemptions == 0
    assert pace.seconds["prefill"] > 0 and pace.seconds["full"] > 0


def test_sequences_that_wait_for_a_place_do_not_count_as_running(alone: None) -> None:
    policy = Policy(with_adapter(load_model("shallow")).eval())
    with engine_on(policy, max_num_seqs=3) as engine:
        groups = engine.generate(PROMPTS, SamplingParams(n=4, max_tokens=12, seed=1, ignore_eos=True))
        pace = engine.pace.pop_measured()
    assert pace.most == 3 and sum(len(group) for group in groups) == 8
    assert pace.tokens["tail"] == 0  # two rows are left in the last steps, of three
    assert pace.tokens["full"] == 8 * 11


@pytest.mark.slow
def test_preemptions_are_those_that_vllm_counts(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(with_adapter(load_model("shallow")).eval())
    least = least_kv_bytes(policy, CONTEXT)
    with engine_on(policy, max_num_seqs=8, kv_cache_bytes=least) as engine:
        scheduler, told = scheduler_of(engine), {}
        step = engine.llm.llm_engine.step

        def spy() -> Any:
            outputs = step()
            told.update({name: request.num_preemptions for name, request in scheduler.requests.items()})
            return outputs

        monkeypatch.setattr(engine.llm.llm_engine, "step", spy)
        params = SamplingParams(n=4, max_tokens=200, seed=1, ignore_eos=True)
        groups = engine.generate(PROMPTS, params)
        pace = engine.pace.pop_measured()
    assert pace.preemptions == sum(told.values()) > 0
    assert all(len(rollout.completion_ids) == 200 for group in groups for rollout in group)


@pytest.mark.parametrize(("missing", "at_once"), [(0, True), pytest.param(2, False, marks=pytest.mark.slow)])
def test_a_group_holds_its_prompt_once_so_that_the_plan_may_count_it_once(
    alone: None, missing: int, at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 completions of 128 tokens of a prompt of 384 (`rows.cache_bytes`): 11 blocks, 6 times the one
    with the prompt's last token, which vLLM always computes, and 4 more; and one that is never used."""
    policy = policy_of("qwen2", torch.float32, False, tmp_path)
    size = kv_bytes_of(policy, (11 + 6 * 5 + 1 - missing) * BLOCK_ON_CPU, BLOCK_ON_CPU)
    params = SamplingParams(n=6, max_tokens=128, seed=1, ignore_eos=True)
    with engine_on(policy, kv_cache_bytes=size, max_num_seqs=6) as engine:
        steps, step = [], engine.llm.llm_engine.step
        monkeypatch.setattr(engine.llm.llm_engine, "step", lambda: (steps.append(1), step())[1])
        engine.generate([[number % 300 + 5 for number in range(CONTEXT - 128)]], params)
    assert (len(steps) <= 128 + 4) == at_once
