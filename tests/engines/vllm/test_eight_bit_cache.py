"""A key-value cache in 8 bits: vLLM holds twice as many tokens, and the parity gate measures what rounding does."""

import logging
from pathlib import Path

import pytest
import torch
from published_model import published_model
from vllm_models import CONTEXT, NEEDS_VLLM, engine_on, move_adapter, policy_of

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.config.loading import EngineSettings
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.engines.vllm.settings import least_kv_bytes
from lowmem_grpo.losses.off_policy import MismatchWatch
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rollout.parity import ParityError, ParityGate
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import RolloutGroup

pytestmark = [*NEEDS_VLLM, pytest.mark.slow, pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="vLLM's 8-bit cache on a CPU needs AVX-512")]
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], list(range(20, 60))]
PARAMS = SamplingParams(n=4, max_tokens=48, seed=1, ignore_eos=True)


def blocks(engine: VLLMEngine) -> int:
    """Blocks of vLLM's cache."""
    return int(engine.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)


def measured(policy: Policy, engine: VLLMEngine, bound: float | None = None) -> dict[str, float]:
    """What the parity gate of a run with this engine finds in its samples."""
    groups = [RolloutGroup({}, *pair) for pair in zip(PROMPTS, engine.generate(PROMPTS, PARAMS), strict=True)]
    gate = ParityGate(policy, PARAMS, 1, bound, state=TrainerState(), cache_dtype=engine.cache_dtype,
                      mismatch=MismatchWatch())
    return gate.watch(groups)


def test_it_holds_twice_the_tokens_and_the_gate_measures_the_rounding_and_advises_without_switching(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = policy_of("llama", torch.bfloat16, False, tmp_path)
    move_adapter(policy, 0.05)
    found: dict[str, dict[str, float]] = {}
    held: dict[str, int] = {}
    for kind in ("auto", "fp8", "fp8_e5m2"):
        with engine_on(policy, kv_cache_dtype=kind) as engine, caplog.at_level(logging.WARNING):
            caplog.clear()
            found[kind], held[kind] = measured(policy, engine), blocks(engine)
            advised = [text for text in caplog.messages if "the key-value cache is in 8 bits" in text]
            assert len(advised) == (kind != "auto")
            assert all("vllm_importance_sampling_correction is None" in text for text in advised)
            if kind == "fp8":
                with pytest.raises(ParityError, match="keys too large for 8 bits"):
                    measured(policy, engine, bound=1e-4)
    mean = {kind: metrics["sampling/parity/mean"] for kind, metrics in found.items()}
    assert held["fp8"] >= 1.9 * held["auto"]
    assert mean["auto"] <= 0.003
    assert 2 * mean["auto"] < mean["fp8"] <= 0.03
    assert 1.5 * mean["fp8"] < mean["fp8_e5m2"] <= 0.06  # one bit of mantissa less


def test_the_smallest_cache_of_a_context_has_half_the_bytes_and_room_for_one_sequence(tmp_path: Path) -> None:
    policy = policy_of("qwen2", torch.bfloat16, False, tmp_path)
    needed = least_kv_bytes(policy, CONTEXT, cache_dtype="fp8")
    assert 2 * needed == least_kv_bytes(policy, CONTEXT)
    longest = SamplingParams(n=1, max_tokens=CONTEXT - 40, seed=1, ignore_eos=True)
    with engine_on(policy, kv_cache_bytes=needed, kv_cache_dtype="fp8") as engine:
        (rollouts,) = engine.generate([list(range(20, 60))], longest)
        assert len(rollouts[0].completion_ids) == CONTEXT - 40
    with pytest.raises(ValueError, match=f"the key-value cache has {needed - 1:,} bytes; one sequence of"):
        VLLMEngine(policy, engine.tokenizer, CONTEXT,
                   EngineSettings(kv_cache_bytes=needed - 1, kv_cache_dtype="fp8"))


def test_on_a_published_model_healthy_samples_go_on_and_those_of_another_adapter_stop() -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(published_model().folder), max_seq_length=CONTEXT, dtype=torch.bfloat16, load_in_4bit=False)
    policy = Policy(FastLanguageModel.get_peft_model(model, r=8, use_gradient_checkpointing=False))
    chats = [[{"role": "user", "content": text}] for text in ("Why is the sky blue?", "Tell a story about a shy cat.")]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    for kind in ("auto", "fp8_e4m3"):
        with engine_on(policy, kv_cache_dtype=kind) as engine:
            pairs = zip(prompts, engine.generate(prompts, SamplingParams(n=4, max_tokens=32, seed=1)), strict=True)
            groups = [RolloutGroup({}, *pair) for pair in pairs]
            gate = ParityGate(policy, PARAMS, 1, None, state=TrainerState(), cache_dtype=engine.cache_dtype)
            gate.check(groups)
        if kind == "auto":
            move_adapter(policy, 0.05)
            with pytest.raises(ParityError, match="Likely causes"):
                gate.check(groups)
