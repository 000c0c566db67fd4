"""vLLM's engine around the trainer's model: what it samples with, and what it refuses."""

import os
import subprocess
import sys
from typing import Any

import peft
import pytest
import torch
from small_models import SPLIT, load_model, scatter, with_adapter
from transformers import PreTrainedTokenizerBase
from vllm_models import (
    CONTEXT,
    GREEDY,
    LONG,
    NEEDS_VLLM,
    OTHER,
    PLAIN,
    SAME,
    cached_tokens,
    distance,
    engine_on,
    ids_of,
    states,
)

from lowmem_grpo.config.loading import EngineUnavailableError
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.engines.vllm.shared_linear import BorrowError
from lowmem_grpo.models.policy import Policy

pytestmark = NEEDS_VLLM


# what it samples with


def test_stale_prefixes_are_dropped_when_the_policy_version_changes(
    engine: VLLMEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached, params = cached_tokens(monkeypatch, engine), SamplingParams(max_tokens=16, seed=1, ignore_eos=True)
    for _ in range(2):
        engine.generate([LONG], params)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.add_(0.05)  # no counter of autograd sees it: the version is all that says so
    stale = engine.generate([LONG], params)
    assert distance(policy, [LONG], stale) > OTHER  # without a word, old keys and values would be used
    engine.on_policy_update(1)
    fresh = engine.generate([LONG], params)
    assert distance(policy, [LONG], fresh) < SAME
    assert cached == [0, 288, 288, 0]


def test_the_base_model_is_sampled_inside_its_block_only_and_its_prefixes_are_kept_apart(
    engine: VLLMEngine, policy: Policy
) -> None:
    params = SamplingParams(n=2, max_tokens=8, seed=1, ignore_eos=True)
    for off in (engine.base_model, policy.base_model) * 2:
        assert distance(policy, [LONG], engine.generate([LONG], params)) < SAME
        with off():
            base = engine.generate([LONG], params)
        assert distance(policy, [LONG], base) > OTHER
        with policy.base_model():
            assert distance(policy, [LONG], base) < SAME
    with pytest.raises(RuntimeError, match="broken"), engine.base_model():
        raise RuntimeError("broken")
    with engine.base_model():
        with engine.base_model():
            pass
        base = engine.generate([LONG], params)
    with policy.base_model():
        assert distance(policy, [LONG], base) < SAME
    assert distance(policy, [LONG], engine.generate([LONG], params)) < SAME


def test_a_saved_adapter_is_sampled_with_and_the_live_one_is_as_before(engine: VLLMEngine, policy: Policy) -> None:
    model, params = policy.model, SamplingParams(n=2, max_tokens=8, seed=1, ignore_eos=True)
    first = engine.generate([LONG], params)
    model.add_adapter("saved", peft.LoraConfig(r=2, lora_alpha=8, target_modules=SPLIT))
    try:
        scatter(model, 0.1, seed=3, of=".saved.")
        model.set_adapter("saved")
        saved = engine.generate([LONG], params)
        assert distance(policy, [LONG], saved) < SAME
        assert distance(policy, [LONG], first) > OTHER
    finally:
        model.set_adapter("default")
        model.delete_adapter("saved")
    again = engine.generate([LONG], params)
    assert ids_of(again) == ids_of(first)
    assert distance(policy, [LONG], again) < SAME


# refusals


@pytest.mark.usefixtures("engine")
def test_a_second_engine_is_refused(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(EngineUnavailableError, match=r"lives in this process already; close\(\) it first"):
        VLLMEngine(policy, tokenizer, CONTEXT, PLAIN)


def test_a_temperature_that_vllm_would_change_is_refused(engine: VLLMEngine, prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"temperature is 0.001; vLLM samples at 0 \(greedy\) or from 0.01 on"):
        engine.generate(prompts, SamplingParams(temperature=0.001))


def test_a_call_that_cannot_be_right_is_not_repeated_and_costs_nothing(
    engine: VLLMEngine, prompts: list[list[int]]
) -> None:
    llm = engine.llm
    bad = {"no tokens": [[5], []], "prompt 1 has the token 384; the model's tokens are 0 to 383": [[5], [6, 384]],
           "the token -1": [[-1]], "leaves no room": [[5], [5] * CONTEXT]}
    for message, calls in bad.items():
        with pytest.raises(ValueError, match=message):
            engine.generate(calls, SamplingParams(max_tokens=2))
    with pytest.raises(Exception, match="n must"):  # refused by vLLM itself, whatever its error is
        engine.generate(prompts, SamplingParams(n=100_000))
    assert engine.llm is llm
    assert len(engine.generate(prompts, GREEDY)) == 3
    assert engine.llm is llm


def test_a_model_that_moved_under_the_engine_is_refused_by_name_and_may_come_back(
    engine: VLLMEngine, policy: Policy, prompts: list[list[int]]
) -> None:
    weight: Any = policy.base.get_submodule("model.layers.1.mlp.up_proj").base_layer.weight
    old = weight.data
    weight.data = old.clone()
    with pytest.raises(BorrowError, match=r"model.layers.1.mlp.gate_up_proj: .*moved or replaced.* make a new one"):
        engine.generate(prompts, GREEDY)
    weight.data = old
    assert len(engine.generate(prompts, GREEDY)) == 3


def test_nan_logits_are_an_error_with_the_likely_causes(engine: VLLMEngine, policy: Policy) -> None:
    norm = policy.base.model.norm.weight
    old, llm = norm.data.clone(), engine.llm
    norm.data.fill_(torch.nan)
    try:
        with pytest.raises(ArithmeticError, match="NaN logits: load it in bfloat16 or float32"):
            engine.generate([LONG], SamplingParams(max_tokens=2))
    finally:
        norm.data.copy_(old)
    assert engine.llm is llm  # a fresh engine would give the same
    engine.on_policy_update(1)
    assert distance(policy, [LONG], engine.generate([LONG], SamplingParams(max_tokens=2))) < SAME


QUIET = """
from lowmem_grpo import FastLanguageModel, SamplingParams
model, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=64, fast_inference="vllm")
print(model.fast_generate(["1+1="], SamplingParams(max_tokens=2))[0].prompt)
"""


@pytest.mark.slow
def test_a_program_that_closes_nothing_prints_no_warning_and_ends_without_an_error() -> None:
    settings = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    done = subprocess.run([sys.executable, "-c", QUIET], env=settings, capture_output=True, text=True,
                          timeout=400, check=True)
    lines = [line for line in (done.stdout + done.stderr).splitlines()
             if line and "Loading weights" not in line and "init_cpu_memory_env" not in line]  # the last is torch's
    assert lines == ["1+1="], lines


# the rollout copy


@pytest.mark.usefixtures("alone")
def test_an_engine_on_a_model_without_an_adapter_samples_with_the_base_model(prompts: list[list[int]]) -> None:
    policy, before = Policy(load_model("shallow").requires_grad_(False).eval()), states()
    with engine_on(policy) as engine:
        assert states() == before  # nor does starting change the process's random numbers
        groups = engine.generate(prompts, SamplingParams(n=2, max_tokens=8, seed=1))
        assert distance(policy, prompts, groups) < SAME
        with_adapter(policy.base)
        with pytest.raises(BorrowError, match="an adapter was added or unloaded"):
            engine.generate(prompts, GREEDY)
        before = states()
    assert states() == before
