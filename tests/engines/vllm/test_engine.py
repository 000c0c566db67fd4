"""vLLM's engine around the trainer's model: what it gives, what it keeps, what it refuses, and its end."""

import gc
import random
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from small_models import SPLIT, TINY, load_model, with_adapter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Starcoder2Config, Starcoder2ForCausalLM
from vllm_models import CONTEXT, KV_BYTES, NEEDS_VLLM, differences, engine_on, move_adapter, policy_of

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.decoding import truncate
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.engines.vllm.capacity import kv_bytes_of
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.engines.vllm.installed import EngineUnavailableError
from lowmem_grpo.engines.vllm.lent_layers import LAYERS, BorrowedLinear, BorrowError
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout

pytestmark = NEEDS_VLLM

QUESTION = "Start with 17. Add 8. Subtract 13. Multiply by 3. What is the result?"
LONG = [number % 500 + 3 for number in range(300)]  # two blocks of vLLM's cache, and a part of a third
SAME = 1e-5  # mean |difference| of log-probabilities in float32
OTHER = 1e-3  # what an adapter that moved changes, at least
GREEDY = SamplingParams(temperature=0, max_tokens=40)

Groups = list[list[Rollout]]


class Shared:
    """One engine for most tests of this file: it is made anew where a test closed it or needed another."""

    engine: VLLMEngine | None = None
    policy: Policy


@pytest.fixture(scope="module", autouse=True)
def close_at_the_end() -> Iterator[None]:
    yield
    close_shared()


def close_shared() -> None:
    if Shared.engine is not None:
        Shared.engine.close()
        Shared.engine = None


@pytest.fixture(scope="module")
def policy() -> Policy:
    """The embedded model in float32, under an adapter with dropout, which must never act."""
    return Policy(with_adapter(load_model("tiny"), lora_dropout=0.5).eval())


@pytest.fixture
def engine(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> VLLMEngine:
    """The shared engine; the adapter is as at the start of each test."""
    if Shared.engine is None or Shared.engine.llm is None:
        Shared.engine = VLLMEngine(policy, tokenizer, CONTEXT, kv_cache_bytes=KV_BYTES)
    move_adapter(policy, 0.05)
    Shared.engine.on_policy_update(0)
    return Shared.engine


@pytest.fixture
def alone() -> None:
    """No engine lives."""
    close_shared()


@pytest.fixture
def other(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> TransformersEngine:
    """transformers' engine on the same model."""
    return TransformersEngine(policy, tokenizer, CONTEXT)


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of different lengths, a single token among them."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True)
    question = chat["input_ids"] if not isinstance(chat, list) else chat
    return [question, tokenizer("Start with 5.")["input_ids"], [100]]


def ids_of(groups: Groups) -> list[list[list[int]]]:
    return [[rollout.completion_ids for rollout in group] for group in groups]


def distance(policy: Policy, prompts: list[list[int]], groups: Groups) -> float:
    """Mean |difference| between the trainer's log-probabilities and the sampler's."""
    return differences(policy, prompts, groups).abs().mean().item()


def spied(monkeypatch: pytest.MonkeyPatch, engine: VLLMEngine) -> list[Any]:
    """vLLM's own outputs of the calls to come."""
    seen: list[Any] = []
    generate = engine.llm.generate

    def spy(*args: Any, **options: Any) -> Any:
        seen.append(generate(*args, **options))
        return seen[-1]

    monkeypatch.setattr(engine.llm, "generate", spy)
    return seen


def cached_tokens(outputs: list[Any]) -> int:
    return sum(output.num_cached_tokens for output in outputs)


# what it samples with


def test_an_adapter_changed_in_place_is_seen_by_the_next_call_of_itself(
    engine: VLLMEngine, policy: Policy, prompts: list[list[int]]
) -> None:
    params = SamplingParams(n=4, max_tokens=16, seed=1, ignore_eos=True)
    before = engine.generate([*prompts, LONG], params)
    move_adapter(policy, 0.2, seed=2)
    after = engine.generate([*prompts, LONG], params)
    assert distance(policy, [*prompts, LONG], after) < SAME
    assert distance(policy, [*prompts, LONG], before) > OTHER


class Counted(TorchDispatchMode):
    """Counts the operations on tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_policy_update_moves_no_byte_and_takes_less_than_a_millisecond(engine: VLLMEngine) -> None:
    seconds = []
    with Counted() as operations:
        for version in range(20):
            started = time.perf_counter()
            engine.on_policy_update(version)
            seconds.append(time.perf_counter() - started)
    assert operations.count == 0
    assert statistics.median(seconds) < 1e-3


def test_stale_prefixes_are_dropped_when_the_policy_version_changes(
    engine: VLLMEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs, params = spied(monkeypatch, engine), SamplingParams(max_tokens=16, seed=1, ignore_eos=True)
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
    assert [cached_tokens(calls) for calls in outputs] == [0, 256, 256, 0]


@pytest.mark.parametrize("kind", ["base_model", "disable_adapter"])
def test_prefixes_of_the_base_model_and_of_the_policy_are_kept_apart(
    engine: VLLMEngine, policy: Policy, kind: str
) -> None:
    params = SamplingParams(n=2, max_tokens=8, seed=1, ignore_eos=True)
    off = {"base_model": engine.base_model, "disable_adapter": policy.base_model}[kind]
    for _ in range(2):
        assert distance(policy, [LONG], engine.generate([LONG], params)) < SAME
        with off():
            base = engine.generate([LONG], params)
        with policy.base_model():
            assert distance(policy, [LONG], base) < SAME
        assert distance(policy, [LONG], base) > OTHER


def test_the_base_model_ends_with_its_block_also_after_an_error(engine: VLLMEngine, policy: Policy) -> None:
    params = SamplingParams(n=2, max_tokens=8, seed=1, ignore_eos=True)
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
        for name, parameter in model.named_parameters():
            if ".saved." in name:
                parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(3))
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


def test_dropout_does_not_act_and_the_mode_stays(
    engine: VLLMEngine, policy: Policy, prompts: list[list[int]]
) -> None:
    policy.model.train()
    groups = engine.generate(prompts, SamplingParams(n=4, max_tokens=16, seed=1))
    assert policy.model.training
    assert distance(policy, prompts, groups) > OTHER  # dropout acts on the trainer's side now
    policy.model.eval()
    assert distance(policy, prompts, groups) < SAME


def test_the_policy_version_at_the_start_of_a_call_is_recorded(
    engine: VLLMEngine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.on_policy_update(3)
    generate = engine.llm.generate

    def updated_meanwhile(*args: Any, **options: Any) -> Any:
        engine.policy_version = 4
        return generate(*args, **options)

    monkeypatch.setattr(engine.llm, "generate", updated_meanwhile)
    assert engine.generate(prompts[:1], SamplingParams(max_tokens=1))[0][0].policy_version == 3


# completions


def test_completions_of_a_prompt_share_its_prefill(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    layer = next(iter(LAYERS.values()))
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: rows.append(len(x)) or forward(x))
    (group,) = engine.generate([LONG], SamplingParams(n=8, max_tokens=1, seed=1))
    assert len(group) == 8
    remainder = len(LONG) % 128  # whole blocks are shared
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


@pytest.mark.parametrize("name", PARAMS)
def test_greedy_completions_end_and_read_as_with_transformers_engine(
    engine: VLLMEngine, other: TransformersEngine, prompts: list[list[int]], name: str
) -> None:
    params = replace(SamplingParams(temperature=0, max_tokens=60), **PARAMS[name])
    for (got,), (expected,) in zip(engine.generate(prompts, params), other.generate(prompts, params), strict=True):
        assert got.completion_ids == expected.completion_ids
        assert (got.finish_reason, got.text) == (expected.finish_reason, expected.text)
        difference = torch.tensor(got.rollout_logprobs) - torch.tensor(expected.rollout_logprobs)
        assert difference.abs().mean() < SAME


def test_a_completion_fills_the_context_and_no_more(engine: VLLMEngine) -> None:
    params = SamplingParams(max_tokens=50, ignore_eos=True, seed=1)
    lengths = [CONTEXT - 1, CONTEXT - 2, CONTEXT - 50, CONTEXT - 51, 4]
    groups = engine.generate([[5 + number % 9 for number in range(length)] for length in lengths], params)
    assert [len(rollout.completion_ids) for (rollout,) in groups] == [1, 2, 50, 50, 50]
    assert {rollout.finish_reason for (rollout,) in groups} == {"length"}
    with pytest.raises(ValueError, match=f"a prompt of {CONTEXT} tokens leaves no room in a context of {CONTEXT}"):
        engine.generate([[5] * 4, [5] * CONTEXT], params)
    assert len(engine.generate([[5] * 4], params)) == 1


def test_the_same_seed_draws_the_same_tokens(engine: VLLMEngine, prompts: list[list[int]]) -> None:
    params = SamplingParams(n=4, max_tokens=16, seed=7, ignore_eos=True)
    first = ids_of(engine.generate(prompts, params))
    assert ids_of(engine.generate(prompts, params)) == first
    assert ids_of(engine.generate(prompts, replace(params, seed=8))) != first
    assert ids_of(engine.generate(prompts, replace(params, seed=None))) != ids_of(
        engine.generate(prompts, replace(params, seed=None))
    )


def test_no_two_completions_share_their_random_numbers(engine: VLLMEngine, prompts: list[list[int]]) -> None:
    params = SamplingParams(n=8, max_tokens=24, ignore_eos=True, temperature=2.0)
    drawn = [completion for seed in (7, 8) for group in
             ids_of(engine.generate([prompts[0], prompts[0]], replace(params, seed=seed))) for completion in group]
    assert len({tuple(completion) for completion in drawn}) == 32


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


@pytest.mark.parametrize("options", [
    {}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.8}, {"top_k": 8, "min_p": 0.05}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
], ids=str)
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


def test_tokens_are_drawn_as_often_as_they_should_be(engine: VLLMEngine, policy: Policy) -> None:
    prompt, count = [100], 4000
    groups = engine.generate([prompt] * 4, SamplingParams(n=count // 4, max_tokens=1, seed=5, top_k=6))
    logits = truncate(full_logits(policy, prompt, [0]), SamplingParams(top_k=6))
    expected = logits.softmax(-1)[0] * count
    counts = torch.bincount(torch.tensor([r.completion_ids[0] for g in groups for r in g]), minlength=len(expected))
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert ((counts - expected).square() / expected)[kept].sum() < 25  # 5 degrees of freedom: once in 7,000 seeds


def test_thousands_of_prompts_come_back_in_order(engine: VLLMEngine) -> None:
    prompts = [[number % 300 + 3, 7, number % 11 + 3] for number in range(3000)]
    groups = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
    assert len(groups) == 3000
    few = [0, 299, 300, 1234, 2999]
    assert [ids_of(groups)[number] for number in few] == ids_of(engine.generate([prompts[number] for number in few],
                                                                 SamplingParams(temperature=0, max_tokens=1)))


def test_more_prompt_tokens_than_one_pass_reads_are_no_trouble_with_a_seed(
    engine: VLLMEngine, policy: Policy
) -> None:
    llm, prompts = engine.llm, [[(number * 31 + place * 7) % 300 + 3 for place in range(400)] for number in range(30)]
    groups = engine.generate(prompts, SamplingParams(max_tokens=3, seed=2, ignore_eos=True))
    assert distance(policy, prompts, groups) < SAME
    assert engine.llm is llm


def test_nothing_is_sampled_for_no_prompt(engine: VLLMEngine) -> None:
    assert engine.generate([], SamplingParams()) == []


def states() -> tuple[Any, ...]:
    return (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), sys.excepthook)


@pytest.mark.parametrize("seed", [None, 1])
def test_sampling_leaves_the_processs_random_numbers_alone(
    engine: VLLMEngine, prompts: list[list[int]], seed: int | None
) -> None:
    before = states()
    engine.generate(prompts, SamplingParams(n=2, max_tokens=4, seed=seed))
    assert states() == before


# sleep


def test_on_the_cpu_sleep_does_nothing_and_the_cache_is_counted(engine: VLLMEngine, prompts: list[list[int]]) -> None:
    assert engine.kv_bytes == KV_BYTES
    first = ids_of(engine.generate(prompts, GREEDY))
    engine.sleep()
    engine.sleep()
    assert engine.kv_bytes == KV_BYTES
    engine.wake()
    assert ids_of(engine.generate(prompts, GREEDY)) == first


# refusals


def test_a_temperature_that_vllm_would_change_is_refused(engine: VLLMEngine, prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"temperature is 0.001; vLLM samples at 0 \(greedy\) or from 0.01 on"):
        engine.generate(prompts, SamplingParams(temperature=0.001))


def test_a_second_engine_is_refused_until_the_first_is_closed(
    engine: VLLMEngine, policy: Policy, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> None:
    with pytest.raises(EngineUnavailableError, match=r"lives in this process already; close\(\) it first"):
        VLLMEngine(policy, tokenizer, CONTEXT, kv_cache_bytes=KV_BYTES)
    assert len(engine.generate(prompts, GREEDY)) == 3
    engine.close()
    with engine_on(policy) as second:
        assert len(second.generate(prompts, GREEDY)) == 3


def test_a_call_that_cannot_be_right_is_not_repeated_and_costs_nothing(
    engine: VLLMEngine, prompts: list[list[int]]
) -> None:
    llm = engine.llm
    bad = {"no tokens": [[5], []], "prompt 1 has the token 384; the model's tokens are 0 to 383": [[5], [6, 384]],
           "the token -1": [[-1]], "leaves no room": [[5], [5] * CONTEXT]}
    for message, calls in bad.items():
        with pytest.raises(ValueError, match=message):
            engine.generate(calls, SamplingParams(max_tokens=2))
    for refused in (SamplingParams(stop=""), SamplingParams(n=100_000)):  # by vLLM itself, whatever its error is
        with pytest.raises(Exception, match=r"stop|n must"):
            engine.generate(prompts, refused)
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


# an engine that dies


def dying(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[str]:
    """One layer raises at its third call; the names of the layers that did."""
    layer, died, calls = LAYERS["model.layers.1.self_attn.o_proj"], [], []
    forward = layer.forward

    def raising(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            died.append(layer.name)
            raise error
        return forward(x)

    monkeypatch.setattr(layer, "forward", raising)
    return died


def test_an_engine_that_dies_is_replaced_once_and_the_call_repeated(
    engine: VLLMEngine, policy: Policy, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=3, max_tokens=12, seed=4)
    expected, llm = engine.generate(prompts, params), engine.llm
    died = dying(monkeypatch, RuntimeError("the device is gone"))
    groups = engine.generate(prompts, params)
    assert died
    assert engine.llm is not llm
    assert ids_of(groups) == ids_of(expected)
    assert distance(policy, prompts, groups) < SAME


def test_prompts_are_told_of_late_or_with_other_rollouts_than_are_returned(
    engine: VLLMEngine, prompts: list[list[int]]
) -> None:
    told: list[tuple[int, list[Rollout]]] = []
    unfinished: list[bool] = []

    def listen(prompt: int, rollouts: list[Rollout]) -> None:
        told.append((prompt, rollouts))
        unfinished.append(engine.unfinished)

    params = SamplingParams(n=3, max_tokens=40, seed=4)
    expected = engine.generate(prompts, params)
    groups = engine.generate(prompts, params, listen)
    assert ids_of(groups) == ids_of(expected)
    assert sorted(prompt for prompt, _ in told) == [0, 1, 2] and unfinished == [True, True, False]
    assert all(rollouts is groups[prompt] for prompt, rollouts in told)
    longest = [max(len(rollout.completion_ids) for rollout in group) for group in groups]
    assert [longest[prompt] for prompt, _ in told] == sorted(longest)


def test_what_a_listener_raises_is_taken_for_a_death_of_the_engine(
    engine: VLLMEngine, prompts: list[list[int]]
) -> None:
    told: list[int] = []

    def refuses(prompt: int, rollouts: list[Rollout]) -> None:
        told.append(prompt)
        raise RuntimeError("not mine")

    with pytest.raises(RuntimeError, match="not mine"):
        engine.generate(prompts, GREEDY, refuses)
    assert len(told) == 1
    assert len(engine.generate(prompts, GREEDY)) == 3


def test_a_restarted_engine_tells_of_a_prompt_twice(
    engine: VLLMEngine, policy: Policy, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = SamplingParams(n=2, max_tokens=40, seed=4)
    expected = engine.generate(prompts, lengths)
    told: list[int] = []

    def listen(prompt: int, rollouts: list[Rollout]) -> None:
        if not told:
            dying(monkeypatch, RuntimeError("the device is gone"))
        told.append(prompt)

    llm = engine.llm
    groups = engine.generate(prompts, lengths, listen)
    assert engine.llm is not llm
    assert sorted(told) == [0, 1, 2]
    assert ids_of(groups) == ids_of(expected)
    assert distance(policy, prompts, groups) < SAME


def test_a_second_death_is_an_error_and_the_next_call_works(
    engine: VLLMEngine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def always(self: BorrowedLinear, x: Tensor) -> Tensor:
        raise RuntimeError("the device is gone for good")

    with monkeypatch.context() as patched:
        patched.setattr(BorrowedLinear, "forward", always)
        with pytest.raises(RuntimeError, match="gone for good"):
            engine.generate(prompts, GREEDY)
    assert len(engine.generate(prompts, GREEDY)) == 3


def test_a_call_that_was_broken_off_leaves_nothing_to_the_next(
    engine: VLLMEngine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ids_of(engine.generate(prompts[:1], GREEDY))
    with monkeypatch.context() as patched:
        dying(patched, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts, GREEDY)
    assert ids_of(engine.generate(prompts[:1], GREEDY)) == expected


def test_an_engine_that_dies_under_a_saved_adapter_comes_back_with_the_live_one(
    engine: VLLMEngine, policy: Policy, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: parameter.clone() for name, parameter in policy.model.named_parameters()}
    policy.model.add_adapter("saved", peft.LoraConfig(r=4, target_modules=SPLIT))
    try:
        policy.model.set_adapter("saved")
        dying(monkeypatch, RuntimeError("the device is gone"))
        saved = engine.generate(prompts, GREEDY)
        assert distance(policy, prompts, saved) < SAME
    finally:
        policy.model.set_adapter("default")
        policy.model.delete_adapter("saved")
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.model.named_parameters())
    assert distance(policy, prompts, engine.generate(prompts, GREEDY)) < SAME


# the end


def test_closing_frees_the_cache_and_lets_go_of_the_model(engine: VLLMEngine, policy: Policy) -> None:
    def caches(model: Any) -> list[Tensor]:
        layers = [module.kv_cache for module in model.modules() if hasattr(module, "kv_cache")]
        return [tensor for layer in layers for tensor in (layer if isinstance(layer, list | tuple) else [layer])]

    (found,) = engine.llm.apply_model(caches)
    assert sum(tensor.untyped_storage().nbytes() for tensor in {t.data_ptr(): t for t in found}.values()) > KV_BYTES / 2
    gone = [weakref.ref(tensor) for tensor in found] + [weakref.ref(engine.llm), weakref.ref(engine.loan)]
    engine.loan, found = None, []  # type: ignore[assignment]
    engine.close()
    engine.close()
    gc.collect()
    assert [reference() for reference in gone if reference() is not None] == []
    assert not LAYERS
    assert engine.kv_bytes == 0
    assert not torch.distributed.is_initialized()


def test_a_closed_engine_says_so(engine: VLLMEngine, prompts: list[list[int]]) -> None:
    engine.close()
    uses: list[Callable[[], Any]] = [
        lambda: engine.generate(prompts, GREEDY), lambda: engine.generate([], GREEDY), engine.wake,
        lambda: engine.base_model().__enter__(),
    ]
    for use in uses:
        with pytest.raises(EngineUnavailableError, match="this engine was closed; make a new one"):
            use()
    engine.sleep()
    engine.on_policy_update(1)  # another model took over between a rollout and its update
    engine.close()


@pytest.mark.usefixtures("alone")
def test_an_engine_that_is_deleted_without_close_makes_room_for_the_next(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> None:
    lost: list[Any] = [VLLMEngine(policy, tokenizer, CONTEXT, kv_cache_bytes=KV_BYTES)]
    lost.append(lost)  # a cycle: it is unreachable before it is gone
    del lost
    with engine_on(policy) as engine:
        assert len(engine.generate(prompts, GREEDY)) == 3


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from small_models import TINY, load_model, with_adapter
from transformers import AutoTokenizer
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.config.sampling import SamplingParams
engine = VLLMEngine(Policy(with_adapter(load_model("tiny"))), AutoTokenizer.from_pretrained(TINY), 64,
                    kv_cache_bytes=1 << 26)
print(len(engine.generate([[5, 6]], SamplingParams(max_tokens=2))))
"""


@pytest.mark.usefixtures("alone")
def test_a_program_that_closes_nothing_ends_without_an_error() -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parents[2] / "support"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "1")
    assert "Traceback" not in done.stderr


# starts that fail


@pytest.mark.usefixtures("alone")
def test_models_that_do_not_map_are_refused_by_name_and_a_later_engine_starts(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> None:
    shape = {"vocab_size": 384, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 2}
    backend = Starcoder2ForCausalLM(Starcoder2Config(**shape)).requires_grad_(False).eval()
    call, before = type(backend.model).__call__, states()
    with pytest.raises(BorrowError, match=r"this vLLM has no Starcoder2ForCausalLM of its own.*fast_inference"):
        VLLMEngine(Policy(backend), tokenizer, CONTEXT, kv_cache_bytes=KV_BYTES)
    assert type(backend.model).__call__ is call  # vLLM would have changed the trainer's own class
    assert states() == before

    class UnknownForCausalLM(type(policy.base)):  # type: ignore[misc]
        pass

    unknown = UnknownForCausalLM(policy.base.config).requires_grad_(False).eval()
    with pytest.raises(BorrowError, match=r"this vLLM has no UnknownForCausalLM\. Sample with fast_inference"):
        VLLMEngine(Policy(unknown), tokenizer, CONTEXT, kv_cache_bytes=KV_BYTES)
    unmapped = load_model("tiny").requires_grad_(False).eval()
    del unmapped.model.layers[0].mlp.up_proj
    with pytest.raises(BorrowError, match=r"has no module model.layers.0.mlp.up_proj, which .*gate_up_proj stands"):
        VLLMEngine(Policy(unmapped), tokenizer, CONTEXT, kv_cache_bytes=KV_BYTES)
    extra = load_model("tiny").requires_grad_(False).eval()
    extra.model.layers[1].extra = torch.nn.Linear(2, 2)
    with pytest.raises(BorrowError, match=r"no place for: \['model.layers.1.extra.weight'"):
        VLLMEngine(Policy(extra), tokenizer, CONTEXT, kv_cache_bytes=KV_BYTES)
    assert not LAYERS
    assert not torch.distributed.is_initialized()
    with engine_on(policy) as engine:
        assert distance(policy, prompts, engine.generate(prompts, GREEDY)) < SAME


@pytest.mark.usefixtures("alone")
def test_a_cache_too_small_for_one_sequence_is_refused_with_the_bytes_it_needs(
    policy: Policy, tokenizer: PreTrainedTokenizerBase
) -> None:
    context, needed = 200, kv_bytes_of(policy, 256 + 128)
    with pytest.raises(ValueError, match=f"has {needed - 1:,} bytes; one sequence of max_seq_length={context} needs "
                                         f"{needed:,}"):
        VLLMEngine(policy, tokenizer, context, kv_cache_bytes=needed - 1)
    with engine_on(policy, max_seq_length=context, kv_cache_bytes=needed) as engine:  # so much is enough, in turn
        groups = engine.generate([[5] * 100, [6] * 100], SamplingParams(max_tokens=context, ignore_eos=True, n=2))
        assert {len(rollout.completion_ids) for group in groups for rollout in group} == {context - 100}


@pytest.mark.usefixtures("alone")
def test_settings_that_vllm_refuses_are_an_error_that_says_so(
    policy: Policy, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ValueError, match="max_num_seqs") as caught:
        VLLMEngine(policy, tokenizer, CONTEXT, kv_cache_bytes=KV_BYTES, max_num_seqs=0)
    assert caught.value.__notes__ == [
        "vLLM did not start with Qwen2ForCausalLM and these settings. Change them, or sample with "
        'fast_inference="transformers"'
    ]
    assert not LAYERS


@pytest.mark.usefixtures("alone")
def test_starting_and_closing_leave_the_processs_random_numbers_alone(policy: Policy) -> None:
    before = states()
    with engine_on(policy):
        assert states() == before
    assert states() == before


# the rollout copy


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("four_bit", [False, True])
def test_a_rollout_copy_samples_with_the_published_version_while_the_next_is_trained(
    four_bit: bool, tmp_path: Path, prompts: list[list[int]]
) -> None:
    policy = policy_of("tiny", torch.float32, four_bit, tmp_path)
    params = SamplingParams(n=2, max_tokens=8, seed=1, ignore_eos=True)
    everything = [*prompts, LONG]
    move_adapter(policy, 0.05)
    with engine_on(policy, rollout_copy=True) as engine:
        first = engine.generate(everything, params)
        assert distance(policy, everything, first) < SAME
        move_adapter(policy, 0.3, seed=2)  # version 1 is being trained
        assert ids_of(engine.generate(everything, params)) == ids_of(first)
        engine.restart()  # nor does a fresh engine see it
        again = engine.generate(everything, params)
        assert ids_of(again) == ids_of(first)
        assert again[0][0].policy_version == 0
        engine.publish(1)
        second = engine.generate(everything, params)
        assert distance(policy, everything, second) < SAME
        assert second[0][0].policy_version == 1
        move_adapter(policy, 0.3, seed=3)
        with engine.base_model():
            base = engine.generate(everything, params)
        assert ids_of(engine.generate(everything, params)) == ids_of(second)
    with policy.base_model():
        assert distance(policy, everything, base) < SAME


@pytest.mark.usefixtures("alone")
def test_an_engine_on_a_model_without_an_adapter_samples_with_the_base_model(prompts: list[list[int]]) -> None:
    policy = Policy(load_model("tiny").requires_grad_(False).eval())
    with engine_on(policy) as engine:
        groups = engine.generate(prompts, SamplingParams(n=2, max_tokens=8, seed=1))
        assert distance(policy, prompts, groups) < SAME
        with_adapter(policy.base)
        with pytest.raises(BorrowError, match="an adapter was added or unloaded"):
            engine.generate(prompts, GREEDY)


def test_the_tokenizer_of_the_embedded_model_is_the_one_used_here(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(TINY).get_vocab()
