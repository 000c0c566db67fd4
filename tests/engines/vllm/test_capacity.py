"""How many sequences vLLM decodes together from a cache of so many bytes."""

from pathlib import Path

import pytest
import torch
from vllm_models import CONTEXT, NEEDS_VLLM, engine_on, policy_of

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.vllm.settings import BLOCK_ON_CPU, kv_bytes_of

pytestmark = NEEDS_VLLM


@pytest.mark.parametrize(("missing", "at_once"), [(0, True), pytest.param(2, False, marks=pytest.mark.slow)])
def test_a_group_holds_its_prompt_once_so_that_the_plan_may_count_it_once(
    missing: int, at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
