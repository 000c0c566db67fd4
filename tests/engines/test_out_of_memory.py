"""Memory that runs out in sampling: completions stay the same."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from memory import Failing, failing
from small_models import load_model, with_adapter
from trainer_runs import TEXTS
from transformers import PreTrainedTokenizerBase
from vllm_models import engine_on, ids_of

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.engines.vllm.installed import installed
from lowmem_grpo.engines.vllm.shared_linear import LAYERS
from lowmem_grpo.memory.oom import MemoryAdvice, MemoryExhaustedError, RunMemory
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.utils import GIB


@pytest.fixture
def engine(tokenizer: PreTrainedTokenizerBase) -> TransformersEngine:
    """In float64, where rows that are decoded with fewer others draw the same tokens."""
    return TransformersEngine(Policy(with_adapter(load_model("Llama")).double()), tokenizer, max_seq_length=256)


@pytest.fixture
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return [tokenizer(row["prompt"])["input_ids"] for row in TEXTS[:3]]


@pytest.mark.parametrize("call", [0, 8, *(pytest.param(call, marks=pytest.mark.slow) for call in (1, 15))])
def test_tokens_drawn_before_a_shortage_are_kept_and_the_rest_follows_the_seed(
    engine: TransformersEngine, prompts: list[list[int]], call: int
) -> None:
    params = SamplingParams(n=4, temperature=1.0, max_tokens=20, seed=3, stop_token_ids=[*range(0, 320, 30)])
    undisturbed = engine.generate(prompts, params)
    found = []
    for _ in range(2):
        engine.bound = RunMemory().rollout
        with failing(engine, call) as hook:
            found.append(engine.generate(prompts, params))
        assert hook.raised == 1
    assert ids_of(found[0]) == ids_of(found[1])
    for before, after in zip(itertools.chain(*undisturbed), itertools.chain(*found[0]), strict=True):
        assert before.completion_ids[:call] == after.completion_ids[:call]  # pass `call` would have given token `call`
        if len(before.completion_ids) <= call:
            assert (before.completion_ids, before.finish_reason) == (after.completion_ids, after.finish_reason)
    remembered = engine.generate(prompts, params)
    assert engine.bound.lowered == 6
    assert ids_of(remembered) == ids_of(engine.generate(prompts, params))
    assert remembered[0][0].completion_ids != remembered[1][2].completion_ids


def test_a_single_sequence_without_memory_ends_the_run(engine: TransformersEngine, prompts: list[list[int]]) -> None:
    plan: Any = SimpleNamespace(rows=[SimpleNamespace(name="KV cache", train=0, rollout=GIB)])
    engine.bound.advice = MemoryAdvice({"rollout": ["a lower max_completion_length"]}, plan)
    engine.policy.model.train()
    told = r"sampling 1 at once(.|\n)*KV cache(.|\n)*max_completion_length"
    with failing(engine, *range(100)) as hook, pytest.raises(MemoryExhaustedError, match=told):
        engine.generate(prompts, SamplingParams(n=4, max_tokens=5))
    assert hook.raised == engine.bound.failures == 4  # 12, 6, 3 and 1 at once
    assert engine.policy.model.training


def test_other_errors_of_the_sampler_are_raised(engine: TransformersEngine, prompts: list[list[int]]) -> None:
    hook = Failing(1, error=lambda: RuntimeError("a bug near memory"))
    engine.policy.backbone.norm.register_forward_hook(hook)
    with pytest.raises(RuntimeError, match="a bug near memory"):
        engine.generate(prompts, SamplingParams(n=2, max_tokens=5))
    assert engine.bound.failures == 0


@pytest.mark.vllm
@pytest.mark.skipif(installed() is None, reason="needs vLLM, which is not installed")
@pytest.mark.slow
def test_vllm_is_made_anew_for_half_as_many_sequences(
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_on(Policy(with_adapter(load_model("shallow")))) as engine:
        params = SamplingParams(n=4, max_tokens=12, seed=3)
        expected, llm, given = engine.generate(prompts, params), engine.llm, engine.capacity.wanted_seqs
        layer, hook = LAYERS["model.layers.1.self_attn.o_proj"], Failing(3)
        forward = layer.forward
        monkeypatch.setattr(layer, "forward", lambda x: hook() or forward(x))
        found = engine.generate(prompts, params)
        assert hook.raised == engine.bound.failures == 1
        assert engine.llm is not llm
        assert engine.seqs == engine.bound.lowered == given // 2
        assert ids_of(found) == ids_of(expected)
        engine.bound = RunMemory().rollout  # of a run that resumed with a lower bound
        engine.bound.lowered = 2
        assert ids_of(engine.generate(prompts, params)) == ids_of(expected)
        assert engine.seqs == 2
